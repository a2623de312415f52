"""What the rooms tell each other, beyond vLLM's own messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import DraftTokenIds

__all__ = ["DraftReport", "StepPlan"]

_PLAN = "spd_plan"
_REPORT = "spd_report"


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
        setattr(scheduler_output, _PLAN, self)

    @staticmethod
    def of(scheduler_output: SchedulerOutput) -> StepPlan:
        """The attached plan; empty for steps that no SPD scheduler made (warm-up)."""
        return getattr(scheduler_output, _PLAN, StepPlan())


@dataclass(frozen=True)
class DraftReport:
    """First rank → scheduler: what one step's drafting cost. Rides on the step's `DraftTokenIds`.

    Attributes:
        seconds: time of the drafter, from the end of the stage's forward pass to the drafts.
        waited_seconds: the part of it in which it waited for other ranks' anchors.
        num_bytes: anchors that arrived from other ranks.
        num_failures: 1 if the drafter raised or returned nonsense in this step.
    """

    seconds: float = 0.0
    waited_seconds: float = 0.0
    num_bytes: int = 0
    num_failures: int = 0

    def attach(self, draft_token_ids: DraftTokenIds) -> None:
        """Put this report on the drafts of its step."""
        setattr(draft_token_ids, _REPORT, self)

    @staticmethod
    def of(draft_token_ids: DraftTokenIds) -> DraftReport:
        """The attached report; empty for drafts that no SPD worker made."""
        return getattr(draft_token_ids, _REPORT, DraftReport())
