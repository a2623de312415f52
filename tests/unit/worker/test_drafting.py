"""What the first rank shows its drafter, and what becomes of a drafter's mistakes."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_spd.drafters.base import Drafter, Rows
from vllm_spd.messages import DraftReport, StepPlan
from vllm_spd.worker.drafting import Drafting

VOCAB = 100


class Recorder(Drafter):
    """Answers with what it is given, and remembers what it saw."""

    def __init__(self, answer: list[int | None] | Exception) -> None:
        self.answer = answer
        self.observed: list[Rows] = []
        self.forgotten: list[str] = []

    def observe(self, rows: Sequence[Rows]) -> None:
        self.observed = list(rows)

    def propose(self, rows: Sequence[Rows]) -> list[int | None]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer[: len(rows)]

    def forget(self, req_id: str) -> None:
        self.forgotten.append(req_id)


def step(finished: Sequence[str] = (), preempted: Sequence[str] | None = None, rows: bool = True) -> Any:
    return SimpleNamespace(
        finished_req_ids=set(finished),
        preempted_req_ids=preempted,
        num_scheduled_tokens={"a": 1, "b": 3} if rows else {},
        total_num_scheduled_tokens=4 * rows,
    )


def drafting(drafter: Drafter) -> Drafting:
    requests = {
        "a": SimpleNamespace(prompt_token_ids=[1, 2], output_token_ids=[3, 4], num_computed_tokens=3),
        "b": SimpleNamespace(prompt_token_ids=[5, 6, 7, 8], output_token_ids=[], num_computed_tokens=0),
    }
    runner = SimpleNamespace(
        requests=requests,
        input_batch=SimpleNamespace(req_ids=["a", "b"]),
        model_config=SimpleNamespace(get_vocab_size=lambda: VOCAB),
    )
    return Drafting(drafter, runner)


def test_the_drafter_sees_every_row_and_is_asked_for_those_that_want_a_draft() -> None:
    drafter = Recorder([9])
    drafts = drafting(drafter).run(step(), StepPlan(draft_req_ids=("a",)))
    assert (drafts.req_ids, drafts.draft_token_ids) == (["a"], [[9]])
    assert [(row.req_id, row.start, row.num_rows, row.wants_draft) for row in drafter.observed] == [
        ("a", 3, 1, True),
        ("b", 0, 3, False),
    ]


def test_rows_know_their_tokens() -> None:
    drafter = Recorder([None])
    drafting(drafter).run(step(), StepPlan())
    row = drafter.observed[0]
    assert row.end == 4 and [row.token(position) for position in range(row.end)] == [1, 2, 3, 4]


def test_no_idea_is_an_empty_draft() -> None:
    drafts = drafting(Recorder([None, 7])).run(step(), StepPlan(draft_req_ids=("a", "b")))
    assert drafts.draft_token_ids == [[], [7]]


@pytest.mark.parametrize("rows", [True, False])
def test_finished_and_preempted_requests_are_forgotten(rows: bool) -> None:
    drafter = Recorder([])
    drafting(drafter).begin(step(finished=["x"], preempted=["y"], rows=rows), StepPlan())
    assert drafter.forgotten == ["x", "y"]


@pytest.mark.parametrize(
    ("answer", "drafts"),
    [(RuntimeError("broken"), [[], []]), ([VOCAB, 1], [[], [1]]), ([7, -1], [[7], []]), ([-1, VOCAB], [[], []])],
    ids=str,
)
def test_a_mistake_costs_its_own_drafts_only_and_is_logged_once(
    answer: Any, drafts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    this, messages = drafting(Recorder(answer)), []
    monkeypatch.setattr("vllm_spd.worker.drafting.logger.error", lambda *args, **kwargs: messages.append(args[0]))
    for count in (1, 2):
        assert this.run(step(), StepPlan(draft_req_ids=("a", "b"))).draft_token_ids == drafts
        assert this.num_failures == count
    assert len(messages) == 1 and "plain decoding" in messages[0]


def test_steps_of_no_spd_scheduler_have_an_empty_plan() -> None:
    output: Any = SimpleNamespace()
    assert StepPlan.of(output).draft_req_ids == ()
    StepPlan(draft_req_ids=("a",)).attach(output)
    assert StepPlan.of(output).draft_req_ids == ("a",)


@pytest.mark.parametrize(("answer", "failures"), [([9], 0), ([VOCAB], 1), (RuntimeError("broken"), 1)])
def test_every_step_reports_what_its_drafting_cost(answer: list[int | None] | Exception, failures: int) -> None:
    drafts = drafting(Recorder(answer)).run(step(), StepPlan(draft_req_ids=("a",)))
    report = DraftReport.of(drafts)
    assert report.num_failures == failures and report.num_bytes == 0 and report.seconds > 0
