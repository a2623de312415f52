"""Runs requests inside an engine's child process and brings back everything a user could see of them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.scenarios.scenarios import Case

__all__ = ["Answer", "check_same", "leftovers", "play", "play_with_aborts"]

Logprobs = tuple[dict[int, float] | None, ...] | None


@dataclass(frozen=True)
class Completion:
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: Logprobs


@dataclass(frozen=True)
class Answer:
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: Logprobs
    completions: tuple[Completion, ...]


def play(
    llm: Any, cases: Sequence[Case], adapters: Sequence[str] = (), priorities: list[int] | None = None
) -> list[Answer]:
    """All cases as one batch; `adapters` are the folders of LoRA adapters 1, 2, …"""
    from vllm import TokensPrompt
    from vllm.lora.request import LoRARequest

    prompts = [TokensPrompt(prompt_token_ids=list(case.prompt)) for case in cases]
    params = [sampling_params(case.params) for case in cases]
    lora = [LoRARequest(str(c.adapter), c.adapter, adapters[c.adapter - 1]) if c.adapter else None for c in cases]
    results = llm.generate(prompts, params, use_tqdm=False, priority=priorities, lora_request=lora)
    return [answer_of(result) for result in results]


def sampling_params(params: Mapping[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    keywords = dict(params)
    if constraint := keywords.get("structured_outputs"):
        keywords["structured_outputs"] = StructuredOutputsParams(**constraint)
    return SamplingParams(**keywords)


def answer_of(result: Any) -> Answer:
    completions = tuple(
        Completion(o.text, tuple(o.token_ids), o.finish_reason, o.stop_reason, plain_logprobs(o.logprobs))
        for o in result.outputs
    )
    return Answer(tuple(result.prompt_token_ids), plain_logprobs(result.prompt_logprobs), completions)


def plain_logprobs(steps: Any) -> Logprobs:
    if steps is None:
        return None
    return tuple(step and {token: entry.logprob for token, entry in step.items()} for step in steps)


def check_same(expected: Sequence[Answer], actual: Sequence[Answer]) -> None:
    """Same tokens, text and reasons; logprobs to rounding, because batches have other shapes."""
    for one, other in zip(expected, actual, strict=True):
        check_logprobs(one.prompt_logprobs, other.prompt_logprobs)
        for left, right in zip(one.completions, other.completions, strict=True):
            assert visible(right) == visible(left)
            check_logprobs(left.logprobs, right.logprobs)


def visible(completion: Completion) -> tuple[Any, ...]:
    return completion.token_ids, completion.text, completion.finish_reason, completion.stop_reason


def check_logprobs(one: Logprobs, other: Logprobs) -> None:
    assert (one is None) == (other is None)
    for left, right in zip(one or (), other or (), strict=True):
        assert right == (left and pytest.approx(left, abs=1e-3))


def play_with_aborts(llm: Any, neighbour: Case, victims: Sequence[Case], seed: int) -> tuple[int, ...]:
    """Tokens of `neighbour`, beside which one victim after another is aborted after 0 to 12 tokens."""
    from vllm import TokensPrompt

    engine, draw, texts = llm.llm_engine, random.Random(seed), {}

    def add(name: str, case: Case) -> None:
        prompt = TokensPrompt(prompt_token_ids=list(case.prompt))
        texts[name] = engine.add_request(name, prompt, sampling_params(case.params)) and ()

    add("neighbour", neighbour)
    for index, victim in enumerate(victims):
        add(f"victim-{index}", victim)
        for _ in range(draw.randrange(13)):
            step(engine, texts)
        engine.abort_request([f"victim-{index}"])
    while engine.has_unfinished_requests():
        step(engine, texts)
    return texts["neighbour"]


def step(engine: Any, texts: dict[str, tuple[int, ...]]) -> None:
    for output in engine.step():
        texts[output.request_id] = tuple(output.outputs[0].token_ids)


def leftovers(llm: Any) -> dict[str, int]:
    """What scheduler and drafter still keep. Needs an engine core inside the child itself.

    The workers learn of a request's end with the next step, so one more request runs first, and only it may be left.
    """
    play(llm, [Case((9,), {"temperature": 0, "max_tokens": 2})])
    core = llm.llm_engine.engine_core.engine_core
    scheduler, pool = core.scheduler, core.scheduler.kv_cache_manager.block_pool
    return {
        "ledgers": len(scheduler.ledgers),
        "requests": len(scheduler.requests),
        "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        "drafter": max(core.collective_rpc(drafter_entries)) - 1,
    }


def drafter_entries(worker: Any) -> int:
    """Requests that the drafter's feature store knows; 1 on ranks and for drafters without one."""
    store = getattr(getattr(worker.worker.drafting, "drafter", None), "store", None)
    return 1 if store is None else len(store)
