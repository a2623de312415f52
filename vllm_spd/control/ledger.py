"""The drafts of one request: one proposed, the others in flight. Pure bookkeeping: no vLLM, no torch."""

from __future__ import annotations

from collections import deque
from enum import Enum

__all__ = ["Ledger", "Verdict"]


class Verdict(Enum):
    """What a verified token says about the oldest draft in flight."""

    UNDRAFTED = "undrafted"
    """No draft was in flight at that position; a proposal for it comes too late."""
    ACCEPTED = "accepted"
    """The draft was right; the pipeline goes on."""
    REJECTED = "rejected"
    """The draft was wrong, and everything assumed after it is void: flush."""


class Ledger:
    """Drafts of one request, oldest first.

    `in_flight[i]` is the token assumed at the i-th position after the last verified token; `proposed` is the drafter's
    word for the position after those, not dispatched yet.
    """

    def __init__(self) -> None:
        self.in_flight: deque[int] = deque()
        self.proposed: int | None = None

    def propose(self, draft: int) -> None:
        """Hold the drafter's prediction of the token after the newest one."""
        self.proposed = draft

    def dispatch(self) -> None:
        """The proposed draft enters stage 0 in this cycle."""
        assert self.proposed is not None, "nothing was proposed"
        self.in_flight.append(self.proposed)
        self.proposed = None

    def verify(self, token: int) -> Verdict:
        """Compare the target's own token with the oldest draft in flight; forget what it contradicts."""
        if self.in_flight and self.in_flight[0] == token:
            self.in_flight.popleft()
            return Verdict.ACCEPTED
        verdict = Verdict.REJECTED if self.in_flight else Verdict.UNDRAFTED
        self.void()
        return verdict

    def void(self) -> None:
        """Forget every draft: a flush, a preemption, or the end of a turn."""
        self.in_flight.clear()
        self.proposed = None
