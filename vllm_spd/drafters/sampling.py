"""Drafts drawn at the request's temperature, and the distributions they were drawn from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["DraftSampler"]

SEED_OFFSET = 0x5BD1E995
"""The last rank's generator has vLLM's seed; equal seeds would draw the draft and its verdict from the same numbers."""


class DraftSampler:
    """Draws from q = softmax(draft logits / temperature), and keeps q until it is sent to the last rank.

    A packed row [1 + V] holds the chosen index in the draft vocabulary, -1 for no draft, and then q.
    """

    def __init__(self, draft_vocab_size: int, seed: int, device: torch.device) -> None:
        """
        Args:
            draft_vocab_size: V.
            seed: the engine's; all ranks of a tensor-parallel group must draw the same.
            device: of the logits.
        """
        self._none = torch.zeros(1 + draft_vocab_size, device=device)
        self._none[0] = -1
        self._generator = torch.Generator(device).manual_seed(seed ^ SEED_OFFSET)
        self._drawn: dict[str, Tensor] = {}

    def draw(self, req_ids: Sequence[str], logits_RV: Tensor, temperature_R: Sequence[float]) -> list[int]:
        """Draw one index in the draft vocabulary per request; -1 where the logits are not finite."""
        temperature = torch.tensor(temperature_R, dtype=torch.float32).to(logits_RV.device, non_blocking=True)
        probs_RV = (logits_RV.float() / temperature[:, None]).softmax(-1)
        race_RV = torch.empty_like(probs_RV).exponential_(generator=self._generator)
        index_R = (probs_RV / race_RV).argmax(-1)
        index_R = torch.where(probs_RV.isnan().any(-1), -1, index_R)
        packed = torch.cat([index_R[:, None].float(), probs_RV], dim=1)
        self._drawn.update(zip(req_ids, packed, strict=True))
        return index_R.tolist()

    def take(self, req_ids: Sequence[str]) -> Tensor:
        """Packed rows [R, 1 + V] of the step, in this order; whatever else was drawn is forgotten."""
        rows = torch.stack([self._drawn.get(req_id, self._none) for req_id in req_ids])
        self._drawn.clear()
        return rows

    def discard(self) -> None:
        """Forget what was drawn: the drafter failed, and nothing of it reaches the scheduler."""
        self._drawn.clear()
