"""Counts of what the pipeline did, for vLLM's metrics and for one log line."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from vllm_spd.control.ledger import Verdict
from vllm_spd.messages import DraftReport

if TYPE_CHECKING:
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

__all__ = ["PipelineStats"]


@dataclass
class PipelineStats:
    """Since the last log line. A cycle is one non-empty step; a token is one that the target verified.

    Attributes:
        cycles: steps dispatched with at least one row.
        tokens: tokens verified and delivered.
        accepted: verified tokens that had been drafted right.
        flushes: verified tokens that had been drafted wrong.
        undrafted: verified tokens without a draft in flight.
        void_rows: rows dispatched whose result a flush made worthless.
        draft_failures: steps in which the drafter raised or returned nonsense.
        draft_seconds: time that the drafter took on the first rank, in all.
        waited_seconds: the part of it in which it waited for other ranks' anchors.
        exchanged_bytes: anchors that other ranks sent to the first one.
    """

    cycles: int = 0
    tokens: int = 0
    accepted: int = 0
    flushes: int = 0
    undrafted: int = 0
    void_rows: int = 0
    draft_failures: int = 0
    draft_seconds: float = 0.0
    waited_seconds: float = 0.0
    exchanged_bytes: int = 0
    since: float = field(default_factory=time.monotonic)

    def observe(self, verdict: Verdict) -> None:
        """Count one verified token."""
        self.tokens += 1
        self.accepted += verdict is Verdict.ACCEPTED
        self.flushes += verdict is Verdict.REJECTED
        self.undrafted += verdict is Verdict.UNDRAFTED

    def add(self, report: DraftReport) -> None:
        """Count what one step's drafting cost."""
        self.draft_failures += report.num_failures
        self.draft_seconds += report.seconds
        self.waited_seconds += report.waited_seconds
        self.exchanged_bytes += report.num_bytes

    @property
    def acceptance(self) -> float:
        """Share of drafts that were right; 0.0 before the first one."""
        return self.accepted / max(self.accepted + self.flushes, 1)

    @property
    def tokens_per_cycle(self) -> float:
        """Tokens delivered per cycle, over all requests; 0.0 before the first cycle."""
        return self.tokens / max(self.cycles, 1)

    def line(self) -> str:
        """One line for the log."""
        cycles = max(self.cycles, 1)
        return (
            f"SPD: {self.tokens} tokens in {self.cycles} cycles ({self.tokens_per_cycle:.2f} per cycle), "
            f"acceptance {self.acceptance:.2f}, {self.flushes} flushes, {self.void_rows} void rows, "
            f"{self.undrafted} tokens without a draft, "
            f"per cycle {self.draft_seconds / cycles * 1e3:.2f} ms of drafting, "
            f"{self.waited_seconds / cycles * 1e3:.2f} ms of it waiting for {self.exchanged_bytes / cycles:.0f} bytes "
            f"of other stages, {self.draft_failures} drafter failures"
        )

    def restart(self) -> None:
        """Zero every count."""
        for item in fields(self):
            setattr(self, item.name, 0)
        self.since = time.monotonic()


def to_vllm(accepted: int, rejected: int, num_spec_tokens: int) -> SpecDecodingStats | None:
    """vLLM's speculation counters for one engine step. SPD verifies drafts one by one, so each counts as one token."""
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    if not accepted + rejected:
        return None
    stats = SpecDecodingStats.new(num_spec_tokens)
    for num_accepted in (1,) * accepted + (0,) * rejected:
        stats.observe_draft(num_draft_tokens=1, num_accepted_tokens=num_accepted)
    return stats
