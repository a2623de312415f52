"""PPSD's drafter: the first stage's output of the newest token, an optional trained layer, norm and head."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_spd.drafters.base import Rows
from vllm_spd.drafters.hidden import HiddenStateDrafter

__all__ = ["EarlyExitDrafter"]


class EarlyExitDrafter(HiddenStateDrafter):
    """Nothing comes from other stages, so every row of a step is final at once: prompts, drafts and all."""

    def observe(self, rows: Sequence[Rows]) -> None:
        """Run the layers over the whole step."""
        num_rows = sum(row.num_rows for row in rows)
        boundary_NH = self.taps.rows(num_rows)[-1]
        if self.module.spec_layers:
            starts, ends = [row.start for row in rows], [row.end for row in rows]
            boundary_NH = self.run_layers(
                boundary_NH, self.attention.span_batch([row.req_id for row in rows], starts, ends)
            )
        self._hidden_NH = boundary_NH
        self._last_rows: dict[str, int] = {}
        for row in rows:
            before = max(self._last_rows.values(), default=-1)
            self._last_rows[row.req_id] = before + row.num_rows

    def propose(self, rows: Sequence[Rows]) -> list[int | None]:
        """Read the head at each request's last row."""
        newest = [self._last_rows[row.req_id] for row in rows]
        return self.tokens(rows, self._hidden_NH, torch.tensor(newest, device=self._hidden_NH.device))
