"""Which drafter row has which depth, and which anchors it fuses. Training, inference and tests all ask this module.

A row is one input vector of the drafter, made from the hidden states ("anchors") of one token. How many of them exist
depends on how many stages the token has finished, which follows from its distance to the newest token. No torch here.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

__all__ = ["DEPTH_SCHEDULES", "RowLayout", "default_anchors"]

DEPTH_SCHEDULES = ("paper", "after_first_stage")


@dataclass(frozen=True)
class RowLayout:
    """Stages, anchors and depth schedule of one drafter. Raises ValueError when they do not fit together."""

    num_stages: int
    stage_layers: tuple[int, ...]
    anchors: tuple[int, ...]
    depth_schedule: str = "after_first_stage"
    row_types: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Distinct anchor-prefix lengths over all distances, ascending; one projection exists for each."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stage_layers", tuple(self.stage_layers))
        object.__setattr__(self, "anchors", tuple(self.anchors))
        self._check_stages()
        self._check_anchors()
        lengths = {self.num_anchors(distance) for distance in self.distances}
        object.__setattr__(self, "row_types", tuple(sorted(lengths)))

    @property
    def total_layers(self) -> int:
        return sum(self.stage_layers)

    @property
    def distances(self) -> range:
        """All distances a row can have: 0 (newest token) … n (finished every stage)."""
        return range(self.num_stages + 1)

    def depth(self, distance: int) -> int:
        """Stages whose output the row at this distance may read; distances beyond n count as n."""
        if distance < 0:
            raise ValueError(f"Distance {distance} is negative: count from the newest token backwards, starting at 0.")
        first = 0 if self.depth_schedule == "paper" else 1
        return min(max(first, distance), self.num_stages)

    def boundary(self, depth: int) -> int:
        """Index of the hidden state that leaves stage `depth` (0 = embedding output, L = last layer's output)."""
        return sum(self.stage_layers[:depth])

    def num_anchors(self, distance: int) -> int:
        """Length of the anchor prefix that the row at this distance fuses."""
        return bisect_right(self.anchors, self.boundary(self.depth(distance)))

    def projection_index(self, distance: int) -> int:
        """Which projection (index into `row_types`) the row at this distance uses."""
        return self.row_types.index(self.num_anchors(distance))

    def key_distance(self, query_distance: int, gap: int) -> int:
        """Distance of the row that a query row sees `gap` >= 0 positions before it, in this cycle or cached."""
        return min(self.num_stages, query_distance + gap)

    def anchor_owner(self, anchor: int) -> int:
        """The stage (pipeline rank) that computes this anchor; stage 0 owns the embedding."""
        if not 0 <= anchor <= self.total_layers:
            raise ValueError(f"Anchor {anchor} does not exist: choose one of 0 to {self.total_layers}.")
        ends = list(accumulate(self.stage_layers))
        return 0 if anchor == 0 else bisect_left(ends, anchor)

    def _check_stages(self) -> None:
        if self.num_stages < 1:
            raise ValueError(f"num_stages is {self.num_stages}: use at least 1.")
        if len(self.stage_layers) != self.num_stages:
            raise ValueError(
                f"stage_layers lists {len(self.stage_layers)} stages, but num_stages is {self.num_stages}."
            )
        if min(self.stage_layers) < 0 or self.total_layers < 1:
            raise ValueError(f"stage_layers {list(self.stage_layers)} must be 0 or more each and at least 1 in total.")
        if self.depth_schedule not in DEPTH_SCHEDULES:
            raise ValueError(f"depth_schedule is {self.depth_schedule!r}: use one of {', '.join(DEPTH_SCHEDULES)}.")

    def _check_anchors(self) -> None:
        if not self.anchors or self.anchors[0] != 0:
            raise ValueError(f"Anchors {list(self.anchors)} must start with 0, the embedding output.")
        if any(left >= right for left, right in zip(self.anchors, self.anchors[1:], strict=False)):
            raise ValueError(f"Anchors {list(self.anchors)} must be strictly increasing.")
        if self.anchors[-1] > self.total_layers:
            raise ValueError(f"Anchor {self.anchors[-1]} lies beyond the target's last layer, {self.total_layers}.")


def default_anchors(stage_layers: Sequence[int]) -> tuple[int, ...]:
    """The authors' default anchors {0, l, 3l, 6l, L-1}, clamped to L, where l is the length of the first stage.

    The authors' stages are equal. With l = L/n instead, the boundary of a longer first stage would be no anchor, and
    the newest row could not read what leaves it. A first stage without layers lends its place to the second one.
    """
    first, total = next(count for count in stage_layers if count), sum(stage_layers)
    return tuple(sorted({min(layer, total) for layer in (0, first, 3 * first, 6 * first, total - 1)}))
