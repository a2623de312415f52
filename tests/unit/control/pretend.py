"""A pretend engine: the real SPD scheduler over a pretend pipeline, driven like vLLM's `EngineCore` drives it.

The pretend target predicts from what its KV cache holds, slot by slot, so that a block handed to the wrong request, a
draft left in the cache or a position skipped changes the text.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_spd.control.scheduler import SPDScheduler
from vllm_spd.messages import StepPlan
from vllm_spd.plugin import register

BLOCK = 4
VOCAB = 5
STOP = VOCAB  # never predicted, unless a test says so

Draft = Callable[[str, tuple[int, ...]], int | None]
"""(request, tokens so far) → draft."""


@cache
def vllm_config(model: str, stages: int, drafts: int = 0, **options: Any) -> VllmConfig:
    """A configuration as the plugin makes it; `drafts` 0 means the default."""
    register()
    speculative = {"method": "spd", **({"num_speculative_tokens": drafts} if drafts else {})}
    args = EngineArgs(
        model=model, pipeline_parallel_size=stages, speculative_config=speculative, enforce_eager=True, **options
    )
    return args.create_engine_config()


def target(tokens: Sequence[int]) -> int:
    """The pretend target: depends on every token before, and repeats itself often enough to be guessed."""
    return hash(tuple(tokens)) % VOCAB


def plain(prompt: Sequence[int], max_tokens: int, max_model_len: int, stop: int = STOP) -> list[int]:
    """What plain decoding of the pretend target gives."""
    tokens = list(prompt)
    while len(tokens) < min(len(prompt) + max_tokens, max_model_len) and (
        len(tokens) == len(prompt) or tokens[-1] != stop
    ):
        tokens.append(target(tokens))
    return tokens[len(prompt) :]


def right(request: str, tokens: tuple[int, ...]) -> int:
    """A drafter that is always right."""
    return target(tokens)


class PretendWorkers:
    """All ranks at once: they run the same steps in the same order, so their caches hold the same."""

    def __init__(self, model: Callable[[Sequence[int]], int] = target) -> None:
        self.model = model
        self.slots: dict[tuple[int, int], int] = {}
        self.positions: dict[str, range] = {}
        self.blocks: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.known: dict[str, int] = {}

    def run(self, step: SchedulerOutput) -> dict[str, list[int]]:
        """Sampled tokens per request: none for an unfinished prompt, one otherwise (also for void rows)."""
        for req_id in step.finished_req_ids:
            for state in (self.blocks, self.tokens, self.known):
                state.pop(req_id, None)
        self.update(step)
        self.positions = {r: range(self.start[r], self.start[r] + n) for r, n in step.num_scheduled_tokens.items()}
        return {req_id: self.forward(req_id, positions) for req_id, positions in self.positions.items()}

    def update(self, step: SchedulerOutput) -> None:
        """Follow the messages as vLLM's runner on the first rank does."""
        self.start = {}
        for new in step.scheduled_new_reqs:
            self.tokens[new.req_id] = list(new.prompt_token_ids)
            self.known[new.req_id] = len(new.prompt_token_ids)
            self.blocks[new.req_id] = list(new.block_ids[0])
            self.start[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for index, req_id in enumerate(cached.req_ids):
            start, blocks = cached.num_computed_tokens[index], cached.new_block_ids[index]
            if req_id in cached.resumed_req_ids:
                self.tokens[req_id] = list(cached.all_token_ids[req_id])
                self.known[req_id] = len(self.tokens[req_id])
                self.blocks[req_id] = []
            self.blocks[req_id] += blocks[0] if blocks else []
            self.tokens[req_id][start:] = cached.new_token_ids[index]
            self.start[req_id] = start

    def forward(self, req_id: str, positions: range) -> list[int]:
        for position in positions:
            self.slots[self.slot(req_id, position)] = self.tokens[req_id][position]
        if positions.stop < self.known[req_id]:
            return []
        return [self.model([self.slots[self.slot(req_id, position)] for position in range(positions.stop)])]

    def slot(self, req_id: str, position: int) -> tuple[int, int]:
        return self.blocks[req_id][position // BLOCK], position % BLOCK


@dataclass
class Cycle:
    """What one cycle did, for tables: `positions` dispatched and tokens `emitted`, per request."""

    positions: dict[str, range]
    drafted: set[str]
    emitted: dict[str, list[int]]


@dataclass
class PretendEngine:
    """`cycle()` is one turn of `EngineCore.step_with_batch_queue` and `post_step`."""

    config: VllmConfig
    draft: Draft = right
    num_blocks: int = 1000
    model: Callable[[Sequence[int]], int] = target
    emitted: dict[str, list[int]] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    stats: list[SchedulerStats] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stages = self.config.parallel_config.pipeline_parallel_size
        self.scheduler = make_scheduler(self.config, self.num_blocks)
        self.workers = PretendWorkers(self.model)
        self.queue: deque[tuple[SchedulerOutput, dict[str, list[int]]]] = deque()
        self.free_blocks = self.num_free_blocks()

    def num_free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def add(self, req_id: str, prompt: Sequence[int], max_tokens: int, **params: Any) -> Request:
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, **params)
        hasher = get_request_block_hasher(BLOCK, sha256)
        request = Request(req_id, list(prompt), sampling, None, block_hasher=hasher)
        self.scheduler.add_request(request)
        self.emitted[req_id] = []
        return request

    def abort(self, req_id: str) -> None:
        self.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)

    def cycle(self) -> Cycle:
        if not self.scheduler.has_requests():
            return Cycle({}, set(), self.finish_oldest())
        step = self.scheduler.schedule()
        executed = step.total_num_scheduled_tokens > 0
        in_flight = {req_id for req_id, ledger in self.scheduler.ledgers.items() if ledger.in_flight}
        self.queue.append((step, self.workers.run(step)))
        waits = len(self.queue) == self.stages or not (executed or self.scheduler.has_requests())
        emitted = self.finish_oldest() if waits else {}
        if executed:
            self.scheduler.update_draft_token_ids(self.drafts(step))
        return Cycle(self.workers.positions, in_flight & set(step.num_scheduled_tokens), emitted)

    @property
    def busy(self) -> bool:
        return self.scheduler.has_requests() or bool(self.queue)

    def finish_oldest(self) -> dict[str, list[int]]:
        step, sampled = self.queue.popleft()
        req_ids = list(sampled)
        output = ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: index for index, req_id in enumerate(req_ids)},
            sampled_token_ids=[sampled[req_id] for req_id in req_ids],
        )
        results = self.scheduler.update_from_output(step, output)
        self.stats += [each.scheduler_stats for each in results.values() if each.scheduler_stats is not None]
        emitted: dict[str, list[int]] = {}
        for result in itertools.chain.from_iterable(each.outputs for each in results.values()):
            self.emitted[result.request_id] += result.new_token_ids
            emitted[result.request_id] = result.new_token_ids
            if result.finish_reason is not None:
                self.finished.add(result.request_id)
        return emitted

    def drafts(self, step: SchedulerOutput) -> DraftTokenIds:
        wanted = list(StepPlan.of(step).draft_req_ids)
        drafts = [self.draft(req_id, tuple(self.workers.tokens[req_id])) for req_id in wanted]
        return DraftTokenIds(wanted, [[] if draft is None else [draft] for draft in drafts])

    def run(self, limit: int = 1000) -> int:
        """Cycles until nothing is left to do."""
        for count in range(limit):
            if not self.busy:
                return count
            self.cycle()
        raise AssertionError(f"still busy after {limit} cycles")


class NoGrammar:
    """Stands for vLLM's structured-output manager where no request has a grammar."""

    def validate_tokens(self, request: Request, tokens: list[int]) -> list[int]:
        return tokens

    def accept_tokens(self, request: Request, tokens: list[int]) -> bool:
        return True


def make_scheduler(config: VllmConfig, num_blocks: int, grammar: Any = None) -> SPDScheduler:
    init_none_hash(sha256)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    config.cache_config.num_gpu_blocks = num_blocks
    return SPDScheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=grammar or NoGrammar(),
        block_size=BLOCK,
        log_stats=True,
    )
