"""What the rooms tell each other, beyond vLLM's own messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

__all__ = ["StepPlan"]

_ATTRIBUTE = "spd_plan"


@dataclass(frozen=True)
class StepPlan:
    """Scheduler → workers. Rides on the `SchedulerOutput` of its step, so that a cycle needs no message of SPD's own.

    Attributes:
        draft_req_ids: requests whose newest token is in this step and that can use one more draft.
        num_finished: non-empty steps whose results the scheduler had seen when it made this one.
    """

    draft_req_ids: tuple[str, ...] = ()
    num_finished: int = 0

    def attach(self, scheduler_output: SchedulerOutput) -> None:
        """Put this plan on the message that vLLM broadcasts for the step."""
        setattr(scheduler_output, _ATTRIBUTE, self)

    @staticmethod
    def of(scheduler_output: SchedulerOutput) -> StepPlan:
        """The attached plan; empty for steps that no SPD scheduler made (warm-up)."""
        return getattr(scheduler_output, _ATTRIBUTE, StepPlan())
