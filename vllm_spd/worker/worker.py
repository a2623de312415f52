"""What every SPD worker adds to vLLM's worker, on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu_worker import Worker

from vllm_spd.config import SPDConfig
from vllm_spd.messages import StepPlan
from vllm_spd.worker.assembly import assemble
from vllm_spd.worker.runner_v1 import adopt

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput

__all__ = ["SPDWorkerMixin"]


class SPDWorkerMixin(Worker):
    """Runs vLLM's own plain decoding, then, on the first rank, the drafter."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self.spd = SPDConfig.from_vllm_config(vllm_config)
        # The runner shall see ordinary decoding: every row it gets is one token, verified by plain sampling.
        vllm_config.speculative_config = None
        self.speculative_config = None
        self._failure: Exception | None = None

    def init_device(self) -> None:
        """Create vLLM's runner and make it SPD's."""
        super().init_device()
        adopt(self.model_runner, self.spd)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load this rank's stage, and the drafter on the first rank."""
        super().load_model(*args, **kwargs)
        parts = assemble(self.spd, self.model_runner)
        self.drafting, self.anchors, self.verifier = parts.drafting, parts.anchors, parts.verifier
        self.model_runner.verifier = parts.verifier

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Run this rank's stage for one step.

        Returns:
            On the first rank `DraftTokenIds`, made after the stage's output is on its way to the next rank. What
            vLLM's worker returns otherwise, and for an empty step.
        """
        plan = StepPlan.of(scheduler_output)
        num_rows = scheduler_output.total_num_scheduled_tokens
        if self.drafting is not None:
            self.drafting.begin(scheduler_output, plan)
        try:
            output = super().execute_model(scheduler_output)
        except Exception as error:
            self._failure = error
            raise
        if self.anchors is not None and num_rows:
            self.anchors.send(num_rows)
        if self.verifier is not None and num_rows:
            self.verifier.expect(plan)
        if self.drafting is not None and num_rows:
            return self.drafting.run(scheduler_output, plan)
        return output

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        """Sample on the last rank. A failed step is reported here: only the first rank answers `execute_model`."""
        if self._failure is not None:
            raise self._failure
        return super().sample_tokens(grammar_output)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Drafts travel with the first rank's answer to `execute_model`, so nothing is left to take."""
        return None
