"""Runs the drafter on the first rank and keeps its mistakes away from the requests."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.outputs import DraftTokenIds

from vllm_spd.drafters.base import Drafter, Rows
from vllm_spd.logs import logger_of
from vllm_spd.messages import DraftReport, StepPlan
from vllm_spd.worker.verify import sampled_drafts

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_spd.drafters.sampling import DraftSampler
    from vllm_spd.worker.exchange import Sender

__all__ = ["DraftOutlet", "Drafting"]

logger = logger_of(__name__)


class DraftOutlet:
    """Sends what the drafter drew to the last rank: one message in every step that has any to draw."""

    def __init__(self, sampler: DraftSampler, sender: Sender) -> None:
        self._sampler = sampler
        self._sender = sender

    def send(self, req_ids: Sequence[str]) -> None:
        """Send the rows of these requests, in this order."""
        if req_ids:
            self._sender.send(self._sampler.take(req_ids))

    def discard(self) -> None:
        """The drafts of this step reach nobody."""
        self._sampler.discard()


class Drafting:
    """One step in, one `DraftTokenIds` out. A drafter that fails costs drafts, never a request."""

    def __init__(self, drafter: Drafter, runner: Any, outlet: DraftOutlet | None = None) -> None:
        """
        Args:
            drafter: makes the predictions.
            runner: vLLM's model runner of the first rank; its `requests` hold the tokens.
            outlet: sends the distributions of drawn drafts to the last rank; None if drafts are best guesses.
        """
        self.drafter = drafter
        self._runner = runner
        self._outlet = outlet
        self._vocab_size: int = runner.model_config.get_vocab_size()
        self.num_failures = 0

    def begin(self, scheduler_output: SchedulerOutput, plan: StepPlan) -> None:
        """Announce a step to the drafter before this rank's stage runs; a step without rows may end requests too."""
        for req_id in (*scheduler_output.finished_req_ids, *(scheduler_output.preempted_req_ids or ())):
            self.drafter.forget(req_id)
        if scheduler_output.total_num_scheduled_tokens:
            self.drafter.begin(scheduler_output.total_num_scheduled_tokens, plan.num_finished)

    def run(self, scheduler_output: SchedulerOutput, plan: StepPlan) -> DraftTokenIds:
        """Show the step to the drafter, ask for the drafts that the plan wants, and report what it cost."""
        started, before = time.perf_counter(), self._totals()
        drawn = sampled_drafts(self._runner.requests, plan) if self._outlet is not None else []
        rows = self._rows(scheduler_output, frozenset(plan.draft_req_ids), frozenset(drawn))
        wanted = [row for row in rows if row.wants_draft]
        drafts = self._drafts(rows, wanted)
        if self._outlet is not None:
            self._outlet.send(drawn)
        result = DraftTokenIds([row.req_id for row in wanted], [[] if d is None else [d] for d in drafts])
        waited, num_bytes, num_failures = (now - then for now, then in zip(self._totals(), before, strict=True))
        seconds = time.perf_counter() - started
        DraftReport(seconds, waited, int(num_bytes), int(num_failures)).attach(result)
        return result

    def _totals(self) -> tuple[float, int, int]:
        return self.drafter.waited_seconds, self.drafter.num_bytes, self.num_failures

    def _rows(self, scheduler_output: SchedulerOutput, wanted: frozenset[str], drawn: frozenset[str]) -> list[Rows]:
        rows = []
        for req_id in self._runner.input_batch.req_ids:
            state = self._runner.requests[req_id]
            rows.append(
                Rows(
                    req_id=req_id,
                    prompt_token_ids=state.prompt_token_ids or (),
                    output_token_ids=state.output_token_ids,
                    start=state.num_computed_tokens,
                    num_rows=scheduler_output.num_scheduled_tokens[req_id],
                    # Prompts given as embeddings have no tokens to draft from.
                    wants_draft=req_id in wanted and state.prompt_token_ids is not None,
                    temperature=state.sampling_params.temperature if req_id in drawn else 0.0,
                )
            )
        return rows

    def _drafts(self, rows: Sequence[Rows], wanted: Sequence[Rows]) -> list[int | None]:
        try:
            self.drafter.observe([row for row in rows if row.prompt_token_ids])
            drafts = self.drafter.propose(wanted) if wanted else []
        except Exception as error:
            self._count_failure(f"The drafter raised {error!r}")
            if self._outlet is not None:
                self._outlet.discard()
            return [None] * len(wanted)
        sound = [draft if draft is None or 0 <= draft < self._vocab_size else None for draft in drafts]
        if sound != drafts:
            self._count_failure(f"The drafter returned a token outside 0 … {self._vocab_size - 1}, or no number")
        return sound

    def _count_failure(self, what: str) -> None:
        self.num_failures += 1
        if self.num_failures == 1:
            logger.error(
                "%s; its requests go on by plain decoding. Reported once.", what, exc_info=sys.exc_info()[0] is not None
            )
