"""The first rank's store of anchors: the last few tokens of every request, at every anchor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm_spd.drafters.base import Rows
from vllm_spd.models.rows import RowLayout

__all__ = ["FeatureStore", "Placement"]

Ints = np.ndarray
"""One-dimensional int64 array."""


@dataclass(frozen=True)
class Placement:
    """Where the rows of one step lie in the store; only the last `window` rows of each request are kept.

    Attributes:
        rows: index of each kept row in the step's batch.
        slots: its request's slot.
        rings: its place in the slot.
        tenants: the slot's tenant number at the time, to recognise rows whose request has left since.
    """

    rows: Ints
    slots: Ints
    rings: Ints
    tenants: Ints


class FeatureStore:
    """Ring buffers `data_SWAH`: slot (request), position modulo window, anchor, hidden size.

    The window is 2n + 1: a position needs n successors until its deepest row is written, and void drafts may lie up to
    n - 1 positions ahead of the newest token.
    """

    def __init__(self, layout: RowLayout, like: Tensor, num_slots: int = 8) -> None:
        """
        Args:
            layout: rows and anchors of the drafter.
            like: an empty tensor [H] with the model's dtype and device.
            num_slots: requests to make room for at first; doubled when more arrive.
        """
        self.layout = layout
        self.window = 2 * layout.num_stages + 1
        self.data_SWAH = like.new_zeros(num_slots, self.window, len(layout.anchors), like.shape[-1])
        self._slots: dict[str, int] = {}
        self._first: dict[str, int] = {}
        self._free = list(range(num_slots))[::-1]
        self._tenants = np.zeros(num_slots, np.int64)

    def __len__(self) -> int:
        return len(self._slots)

    def place(self, rows: Sequence[Rows]) -> Placement:
        """Assign a place to every row of a step; `rows` lists every request of the batch, in order."""
        parts, offset = [], 0
        for row in rows:
            slot = self._slot(row)
            kept = min(row.num_rows, self.window)
            positions = np.arange(row.end - kept, row.end)
            parts.append((offset + row.num_rows - kept + np.arange(kept), slot, positions))
            offset += row.num_rows
        slots = np.concatenate([np.full(len(positions), slot) for _, slot, positions in parts])
        return Placement(
            rows=np.concatenate([indices for indices, _, _ in parts]),
            slots=slots,
            rings=np.concatenate([positions for _, _, positions in parts]) % self.window,
            tenants=self._tenants[slots],
        )

    def write(self, placement: Placement, anchors: slice, rows_ANH: Tensor) -> None:
        """Store some anchors of a step, unless the request has left its slot in the meantime."""
        current = self._tenants[placement.slots] == placement.tenants
        if not current.any():
            return
        index = [torch.from_numpy(part[current]) for part in (placement.slots, placement.rings, placement.rows)]
        slots, rings, rows = (part.to(self.data_SWAH.device, non_blocking=True) for part in index)
        self.data_SWAH[slots, rings, anchors] = rows_ANH[:, rows].transpose(0, 1)

    def slot(self, req_id: str) -> int:
        """The request's slot."""
        return self._slots[req_id]

    def first_position(self, req_id: str) -> int:
        """Positions before this one were never seen: they came from the prefix cache."""
        return self._first[req_id]

    def release(self, req_id: str) -> None:
        """The request has finished or was preempted; unknown requests are ignored."""
        slot = self._slots.pop(req_id, None)
        if slot is not None:
            del self._first[req_id]
            self._tenants[slot] += 1
            self._free.append(slot)

    def _slot(self, row: Rows) -> int:
        if row.req_id not in self._slots:
            if not self._free:
                self._grow()
            self._slots[row.req_id] = self._free.pop()
            self._first[row.req_id] = row.start
        return self._slots[row.req_id]

    def _grow(self) -> None:
        num_slots = len(self.data_SWAH)
        self.data_SWAH = torch.cat([self.data_SWAH, torch.zeros_like(self.data_SWAH)])
        self._tenants = np.concatenate([self._tenants, np.zeros(num_slots, np.int64)])
        self._free = list(range(num_slots, 2 * num_slots))[::-1]
