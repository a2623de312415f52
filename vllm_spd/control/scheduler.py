"""The scheduler that keeps a request in every stage: it dispatches a request again in each cycle, with a draft."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from vllm_spd.config import SPDConfig
from vllm_spd.control.ledger import Ledger, Verdict
from vllm_spd.control.stats import PipelineStats, to_vllm
from vllm_spd.logs import logger_of
from vllm_spd.messages import DraftReport, StepPlan

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.request import Request
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

__all__ = ["SPDScheduler"]

logger = logger_of(__name__)

LOG_INTERVAL_S = 10.0


class SPDScheduler(Scheduler):
    """vLLM's scheduler plus one ledger per request.

    Arithmetic. A request has m verified tokens and j drafts in flight. `num_output_placeholders` is j, and
    `num_computed_tokens` is m + j once all of them are dispatched, so that one proposed draft in `spec_token_ids`
    makes exactly one new token to schedule. When the oldest step returns, its token either equals the oldest draft
    (m + 1, j - 1: nothing else changes) or flushes: j = 0, `num_computed_tokens` = m, and vLLM's accounting of stale
    output drops the results of the steps still in flight.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.spd = SPDConfig.from_vllm_config(self.vllm_config)
        # vLLM would pad resumed requests with placeholder drafts and reserve slots past them.
        self.num_spec_tokens = 0
        self.num_lookahead_tokens = 0
        self.ledgers: defaultdict[str, Ledger] = defaultdict(Ledger)
        self.num_finished = 0
        self.pipeline_stats = PipelineStats()
        self._step_accepted = 0
        self._step_rejected = 0

    # Drafts come in

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Take the drafter's predictions for the step just dispatched; void the ones a flush has overtaken."""
        self.pipeline_stats.add(DraftReport.of(draft_token_ids))
        for req_id, drafts in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            request = self.requests.get(req_id)
            if request is None or request.is_finished() or not drafts or not self._all_dispatched(request):
                continue
            self.ledgers[req_id].propose(drafts[0])

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Offer every proposed draft to vLLM's scheduling, which treats it as the request's next token."""
        for req_id, ledger in self.ledgers.items():
            if ledger.proposed is not None:
                self._offer(self.requests[req_id], ledger)
        return super().schedule(throttle_prefills)

    def _all_dispatched(self, request: Request) -> bool:
        """Whether every known token is in the pipeline, so that the next one to dispatch is a draft."""
        return request.num_computed_tokens == request.num_tokens + request.num_output_placeholders

    def _offer(self, request: Request, ledger: Ledger) -> None:
        """Set `spec_token_ids` if the pipeline has room for the draft and the request's grammar allows it."""
        if len(ledger.in_flight) >= self.spd.num_speculative_tokens:
            return
        assumed = [*ledger.in_flight, ledger.proposed]
        if len(self.structured_output_manager.validate_tokens(request, assumed)) == len(assumed):
            request.spec_token_ids = [ledger.proposed]
        else:
            ledger.proposed = None

    # Drafts go out

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """Turn each scheduled draft into an ordinary decode row: the runners then see plain decoding."""
        cached = scheduler_output.scheduled_cached_reqs
        for index, req_id in enumerate(cached.req_ids):
            drafts = scheduler_output.scheduled_spec_decode_tokens.pop(req_id, None)
            if drafts is None:
                continue
            cached.new_token_ids[index] = [*cached.new_token_ids[index], *drafts]
            cached.num_output_tokens[index] += 1
            self.requests[req_id].num_output_placeholders += 1
            self.ledgers[req_id].dispatch()
        super()._update_after_schedule(scheduler_output)
        self.pipeline_stats.cycles += scheduler_output.total_num_scheduled_tokens > 0
        wants = (r for r in scheduler_output.num_scheduled_tokens if self._wants_draft(self.requests[r]))
        StepPlan(draft_req_ids=tuple(wants), num_finished=self.num_finished).attach(scheduler_output)

    def _wants_draft(self, request: Request) -> bool:
        """Whether a further token could still be needed after everything that is in the pipeline."""
        if not self._all_dispatched(request):
            return False
        last_output = request.num_output_tokens + request.num_output_placeholders + 1
        return last_output < request.max_tokens and request.num_computed_tokens < self.max_model_len - 1

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """The mask of what may follow the newest token, which lies behind all drafts in flight."""
        in_flight = {
            req_id: list(self.ledgers[req_id].in_flight)
            for req_id in scheduler_output.num_scheduled_tokens
            if req_id in self.ledgers and self.ledgers[req_id].in_flight
        }
        plain = scheduler_output.scheduled_spec_decode_tokens
        scheduler_output.scheduled_spec_decode_tokens = in_flight
        try:
            output = super().get_grammar_bitmask(scheduler_output)
        finally:
            scheduler_output.scheduled_spec_decode_tokens = plain
        return None if output is None else _last_rows(output, in_flight)

    # Results come back

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Count the step, then let vLLM deliver its tokens."""
        self.num_finished += scheduler_output.total_num_scheduled_tokens > 0
        return super().update_from_output(scheduler_output, model_runner_output)

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        new_token_ids, stopped = super()._update_request_with_output(request, new_token_ids, is_stale)
        for token in new_token_ids:
            self._verify(request, token)
        return new_token_ids, stopped

    def _verify(self, request: Request, token: int) -> None:
        verdict = self.ledgers[request.request_id].verify(token)
        self._count(request, verdict)
        if verdict is Verdict.ACCEPTED:
            request.num_output_placeholders -= 1
            return
        request.spec_token_ids = []
        if verdict is Verdict.REJECTED:
            self._flush(request)

    def _flush(self, request: Request) -> None:
        """Everything behind the verified token is void: rewind to it and drop what is still in flight."""
        request.num_output_placeholders = 0
        request.num_computed_tokens = request.num_tokens - 1
        request.num_stale_output_tokens = request.num_in_flight_tokens
        request.drop_stale_output = True
        self.pipeline_stats.void_rows += request.num_in_flight_tokens

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        """Results in flight rest on drafts that the preemption voids, so they are dropped and computed again."""
        super()._preempt_request(request, timestamp, drop_stale_output=True)
        self.ledgers.pop(request.request_id, None)

    def _handle_stopped_request(self, request: Request) -> bool:
        finished = super()._handle_stopped_request(request)
        self.ledgers.pop(request.request_id, None)
        return finished

    def _free_request(
        self, request: Request, delay_free_blocks: bool = False
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        self.ledgers.pop(request.request_id, None)
        return super()._free_request(request, delay_free_blocks)

    # Statistics

    def _count(self, request: Request, verdict: Verdict) -> None:
        self.pipeline_stats.observe(verdict)
        if verdict is Verdict.UNDRAFTED:
            return
        accepted = verdict is Verdict.ACCEPTED
        self._step_accepted += accepted
        self._step_rejected += not accepted
        if request.spec_decode_metrics is not None:
            detailed = self.spec_decode_metrics_level == "detailed"
            request.spec_decode_metrics.observe(num_draft_tokens=1, num_accepted=int(accepted), detailed=detailed)

    def make_stats(
        self, spec_decoding_stats: SpecDecodingStats | None = None, *args: Any, **kwargs: Any
    ) -> SchedulerStats | None:
        """Report through vLLM's speculation counters, and now and then in one log line."""
        if self.log_stats:
            spec_decoding_stats = to_vllm(self._step_accepted, self._step_rejected, self.spd.num_speculative_tokens)
            self._log_now_and_then()
        self._step_accepted = self._step_rejected = 0
        return super().make_stats(spec_decoding_stats, *args, **kwargs)

    def _log_now_and_then(self) -> None:
        stats = self.pipeline_stats
        if stats.tokens and time.monotonic() - stats.since >= LOG_INTERVAL_S:
            logger.info("%s", stats.line())
            stats.restart()


def _last_rows(output: GrammarOutput, in_flight: dict[str, list[int]]) -> GrammarOutput:
    """vLLM masks every position of a request's drafts; the step at hand needs the row behind the last one."""
    rows, row = [], -1
    for req_id in output.structured_output_request_ids:
        row += 1 + len(in_flight.get(req_id, ()))
        rows.append(row)
    return GrammarOutput(output.structured_output_request_ids, output.grammar_bitmask[rows], [0] * len(rows))
