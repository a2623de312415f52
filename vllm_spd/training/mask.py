"""Who sees whom: the block mask that shows the drafter in training what it will see at inference."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from vllm_spd.models.rows import RowLayout

__all__ = ["block_mask", "merged_blocks", "visibility"]


def merged_blocks(distance: int, contents: Sequence[Hashable]) -> list[tuple[int, frozenset[int]]]:
    """Distances that queries of `distance` can see, as (representative, members), grouped by equal contents.

    `contents[d]` identifies the block of distance d: equal values hold equal rows, so their keys need computing once.
    """
    members: dict[Hashable, set[int]] = {}
    for seen in range(distance, len(contents)):
        members.setdefault(contents[seen], set()).add(seen)
    return [(min(group), frozenset(group)) for group in members.values()]


def visibility(
    layout: RowLayout, distance: int, groups: Sequence[frozenset[int]], length: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Boolean mask [S, groups * S] of a query row of `distance` at position t (row) over key rows at T (column).

    Group g's part is True where T <= t and the row visible from there, of distance min(n, distance + t - T), is in g.
    """
    positions = torch.arange(length, device=device)
    gap = positions[:, None] - positions[None, :]
    deepest = max(max(group) for group in groups)
    seen = (distance + gap).clamp(max=deepest)
    parts = [torch.isin(seen, torch.tensor(sorted(group), device=device)) & (gap >= 0) for group in groups]
    return torch.cat(parts, dim=1)


def block_mask(layout: RowLayout, length: int) -> Tensor:
    """The whole mask [(n+1) * S, (n+1) * S] with one block per distance 0 … n, as tests compare with."""
    every = [frozenset({distance}) for distance in layout.distances]
    return torch.cat([visibility(layout, distance, every, length) for distance in layout.distances])
