"""How good a drafter is: agreement, overlap, and what they mean for the pipeline."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from vllm_spd.training.pdm import PDM

__all__ = ["Measures", "hits_and_overlap", "speedup", "tokens_per_cycle"]

LONGEST_RUN = 8


@dataclass
class Measures:
    """Sums over assistant rows, and the hits of every sequence in order."""

    rows: int = 0
    agreed: int = 0
    overlap: float = 0.0
    runs: list[Tensor] = field(default_factory=list)

    def add(self, hits_R: Tensor, overlap_R: Tensor) -> None:
        """One sequence's rows."""
        self.rows += hits_R.numel()
        self.agreed += int(hits_R.sum())
        self.overlap += float(overlap_R.sum())
        self.runs.append(hits_R.cpu())

    @property
    def acceptance(self) -> float:
        """Share of rows whose draft argmax is the target's: acceptance at temperature 0."""
        return self.agreed / max(1, self.rows)

    @property
    def sampled_acceptance(self) -> float:
        """Mean of sum(min(p, q)): acceptance of rejection sampling at temperature 1."""
        return self.overlap / max(1, self.rows)

    def by_distance(self) -> list[float]:
        """Greedy acceptance of the k-th draft after a rejection or the start, k = 1 …; the last entry is "or more"."""
        hits, counts = [0] * LONGEST_RUN, [0] * LONGEST_RUN
        for run in self.runs:
            since = 0
            for hit in run.tolist():
                place = min(since, LONGEST_RUN - 1)
                counts[place] += 1
                hits[place] += hit
                since = since + 1 if hit else 0
        return [hit / max(1, count) for hit, count in zip(hits, counts, strict=True)]

    def __iadd__(self, other: Measures) -> Measures:
        self.rows += other.rows
        self.agreed += other.agreed
        self.overlap += other.overlap
        self.runs += other.runs
        return self


def tokens_per_cycle(acceptance: float, num_stages: int) -> float:
    """Expected tokens per pipeline cycle; a rejection costs n - 1 cycles."""
    return 1.0 / (1.0 + (1.0 - acceptance) * (num_stages - 1))


def speedup(acceptance: float, num_stages: int) -> float:
    """Expected speed-up over the undivided target, with equal stages and a drafter that costs no time."""
    return num_stages * tokens_per_cycle(acceptance, num_stages)


@torch.no_grad()
def hits_and_overlap(
    model: PDM, logits_RV: Tensor, final_RH: Tensor, top1_R: Tensor, logsumexp_R: Tensor
) -> tuple[Tensor, Tensor]:
    """(argmax equal, sum of min(p, q)) of every row, p being the target's distribution over its whole vocabulary."""
    hits = model.draft_token_ids[logits_RV.argmax(-1)] == top1_R
    hidden = model.norm(final_RH)
    rows = model.teacher_rows()
    p = (F.linear(hidden.to(rows.dtype), rows).float() - logsumexp_R[:, None]).exp()
    return hits, torch.minimum(p, logits_RV.softmax(-1)).sum(-1)
