"""Whether samples follow a distribution."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["excess"]


def excess(samples: Tensor, probs_V: Tensor, least: float = 10.0) -> float:
    """Pearson's chi-square in standard deviations above its mean; values below 5 are what chance explains.

    Args:
        samples: [N] token ids.
        probs_V: the distribution they should follow.
        least: tokens expected fewer times than this are counted together.
    """
    counts = torch.bincount(samples.long(), minlength=len(probs_V)).double()
    expected = probs_V.double() * len(samples)
    common = expected >= least
    rare = expected[~common].sum()[None]
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    expected = torch.cat([expected[common], rare])
    observed, expected = observed[expected > 0], expected[expected > 0]
    assert observed.sum() == len(samples), "a token that cannot occur did"
    freedom = len(observed) - 1
    return float((((observed - expected) ** 2 / expected).sum() - freedom) / (2 * max(freedom, 1)) ** 0.5)
