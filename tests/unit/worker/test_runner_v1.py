"""The runner's own arithmetic: which drafts are void, and which rows are stale."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_spd.worker import runner_v1
from vllm_spd.worker.runner_v1 import SPDModelRunner, adopt

PROMPT = 4


def step(positions: dict[str, int], tokens: dict[str, list[int]]) -> Any:
    cached = SimpleNamespace(
        req_ids=list(positions),
        num_computed_tokens=list(positions.values()),
        new_token_ids=[tokens[req_id] for req_id in positions],
    )
    return SimpleNamespace(scheduled_cached_reqs=cached)


def runner(**outputs: list[int]) -> Any:
    """Requests with a prompt of four tokens; `outputs` are the tokens that this rank knows after it."""
    requests = {
        req_id: SimpleNamespace(num_prompt_tokens=PROMPT, output_token_ids=list(known))
        for req_id, known in outputs.items()
    }
    batch = SimpleNamespace(
        req_id_to_index={req_id: index for index, req_id in enumerate(outputs)},
        num_tokens_no_spec=np.array([PROMPT + len(known) for known in outputs.values()]),
    )
    return SimpleNamespace(requests=requests, input_batch=batch)


@pytest.mark.parametrize(
    ("position", "known", "kept"),
    [
        (PROMPT + 3, [7, 8, 9], [7, 8, 9]),  # the next token: nothing is void
        (PROMPT + 2, [7, 8, 9], [7, 8]),  # a flush: the newest draft is void
        (PROMPT, [7, 8, 9], []),
        (1, [7, 8, 9], []),  # resumed inside the prompt
    ],
)
def test_earlier_ranks_forget_what_lies_behind_the_step(position: int, known: list[int], kept: list[int]) -> None:
    this = runner(a=known)
    SPDModelRunner._forget_void_drafts(this, step({"a": position}, {"a": [1]}))
    assert this.requests["a"].output_token_ids == kept
    assert this.input_batch.num_tokens_no_spec.tolist() == [PROMPT + len(kept)]


def test_a_request_outside_the_batch_is_cut_too() -> None:
    this = runner(a=[7, 8, 9])
    this.input_batch.req_id_to_index.clear()
    SPDModelRunner._forget_void_drafts(this, step({"a": PROMPT + 1}, {"a": [1]}))
    assert this.requests["a"].output_token_ids == [7]


@pytest.mark.parametrize(
    ("position", "tokens", "stale"),
    [
        (PROMPT + 2, [9], False),  # the token that was sampled there
        (PROMPT + 2, [8], True),  # another one
        (PROMPT + 3, [5], True),  # a position that nothing has been sampled for
        (PROMPT - 1, [9], False),  # the last token of the prompt
        (PROMPT, [1, 2, 3], False),  # a resumed request is never stale
    ],
)
def test_the_last_rank_knows_a_stale_row_by_its_token(position: int, tokens: list[int], stale: bool) -> None:
    this = runner(a=[7, 8, 9], b=[7])
    found = SPDModelRunner._stale_rows(this, step({"a": position, "b": PROMPT}, {"a": tokens, "b": [7]}))
    assert found == ({"a"} if stale else set())


def test_a_finished_runner_is_adopted_in_place() -> None:
    class Base(runner_v1.GPUModelRunner):
        def __init__(self) -> None:
            self.kept = 1

    mine = Base()
    adopt(mine, SimpleNamespace(num_stages=4))  # type: ignore[arg-type]
    assert isinstance(mine, SPDModelRunner) and isinstance(mine, Base)
    assert type(mine).__name__ == "SPDBase" and mine.kept == 1


@pytest.mark.parametrize(("first", "present", "allocated"), [(True, False, 0), (False, False, 1), (False, True, 0)])
def test_later_ranks_get_the_receive_buffers_that_vllm_forgot(
    first: bool, present: bool, allocated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []

    class Base(runner_v1.GPUModelRunner):
        def __init__(self) -> None:
            self.intermediate_tensors = object() if present else None
            self.max_num_tokens, self.device = 8, "cpu"
            self.model_config = SimpleNamespace(dtype="float32")
            self.model = SimpleNamespace(make_empty_intermediate_tensors=lambda **sizes: calls.append(sizes))

        def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None: ...

    monkeypatch.setattr(runner_v1, "get_pp_group", lambda: SimpleNamespace(is_first_rank=first))
    mine = type("Mine", (runner_v1.PipelineGaps, Base), {})()
    mine.initialize_kv_cache(None)
    assert len(calls) == allocated


def test_void_rows_leave_a_seeded_generator_where_it_was() -> None:
    """Fails when undelivered rows advance the generator: the next token is then drawn from a later state."""

    class Base(runner_v1.GPUModelRunner):
        def __init__(self) -> None:
            self.requests = {"a": SimpleNamespace(output_token_ids=[])}
            generators = {0: torch.Generator().manual_seed(1)}
            self.input_batch = SimpleNamespace(req_ids=["a"], generators=generators)
            self.discard_request_mask = SimpleNamespace(np=np.array([False]))

        def _sample(self, *args: Any, **kwargs: Any) -> Any:
            return torch.rand(1, generator=self.input_batch.generators[0]).item()

    mine: Any = Base()
    adopt(mine, SimpleNamespace(num_stages=4))  # type: ignore[arg-type]
    drawn = []
    for void in (True, False, True, True, False, False, True, False):
        mine.discard_request_mask.np[0] = void
        value = mine._sample()
        if not void:
            drawn.append(value)
            mine.requests["a"].output_token_ids.append(0)
    source = torch.Generator().manual_seed(1)
    assert drawn == [torch.rand(1, generator=source).item() for _ in drawn]
