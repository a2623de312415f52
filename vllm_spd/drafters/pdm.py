"""SPD's own drafter: predicts the token after the newest one from the hidden states of all depths."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vllm_spd.drafters.base import Rows
from vllm_spd.drafters.hidden import HiddenStateDrafter, RowBatch
from vllm_spd.kernels import DraftRows, draft_rows, fused_rows, fused_rows_reference, pack_projections

if TYPE_CHECKING:
    from vllm_spd.models.pdm import PDMModule
    from vllm_spd.worker.exchange import AnchorReceiver
    from vllm_spd.worker.features import FeatureStore, Placement
    from vllm_spd.worker.runner_v1 import DraftAttention
    from vllm_spd.worker.taps import Taps

__all__ = ["PDMDrafter"]


@dataclass
class Step:
    """A step whose anchors are still arriving.

    Attributes:
        placement: where its rows lie in the feature store.
        prompt: its rows that belong to prompts (or to outputs computed again), as the drafter's layers will see them.
        prompt_rows: their indices in the step's batch.
        missing: stages whose anchors have not arrived.
        parts: anchors of the prompt rows by stage, [A, N, H]; empty in steps without prompt rows.
    """

    placement: Placement
    prompt: RowBatch | None
    prompt_rows: Tensor
    missing: set[int]
    parts: dict[int, Tensor] = field(default_factory=dict)


class PDMDrafter(HiddenStateDrafter):
    """One pass over n + 1 rows per request and cycle, and one over each prompt once all its anchors are there."""

    def __init__(
        self, module: PDMModule, taps: Taps, attention: DraftAttention, store: FeatureStore, receiver: AnchorReceiver
    ) -> None:
        super().__init__(module, taps, attention)
        self.store = store
        self.receiver = receiver
        layout = self.layout
        owners = [layout.anchor_owner(anchor) for anchor in layout.anchors]
        self._anchors = {stage: _span(owners, stage) for stage in sorted(set(owners))}
        self._prefixes = layout.row_types
        self._device = store.data_SWAH.device
        self._packed = self._pack() if self._device.type == "cuda" else None
        types = [layout.projection_index(distance) for distance in layout.distances]
        self._type_of_distance = torch.tensor(types, dtype=torch.int32, device=self._device)
        self._steps: deque[tuple[int, Step]] = deque()
        self._last_prompt_step: dict[str, int] = {}
        self._seen: set[str] = set()
        self._num_steps = 0
        self._num_finished = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of anchors received so far."""
        return self.receiver.num_bytes

    @property
    def waited_seconds(self) -> float:
        """Time spent on waiting for them so far."""
        return self.receiver.waited_seconds

    def begin(self, num_rows: int, num_finished: int) -> None:
        """Post the receives of the step."""
        self._num_finished = num_finished
        self.receiver.expect(self._num_steps, num_rows)

    def observe(self, rows: Sequence[Rows]) -> None:
        """Store the first stage's anchors of this step and everything that has arrived of earlier ones."""
        number = self._num_steps
        self._num_steps += 1
        step = self._new_step(number, rows)
        self._steps.append((number, step))
        self._take(number, 0, self.taps.rows(sum(row.num_rows for row in rows)))
        for arrival in self.receiver.collect(number, self._num_finished):
            self._take(arrival.step, arrival.stage, arrival.rows_ANH)
        self._finish_steps()

    def propose(self, rows: Sequence[Rows]) -> list[int | None]:
        """Draft for every request whose prompt the drafter has seen; the others have no idea yet."""
        ready = [row for row in rows if self._is_ready(row)]
        drafts = dict(zip((row.req_id for row in ready), self._draft(ready), strict=True)) if ready else {}
        return [drafts.get(row.req_id) for row in rows]

    def forget(self, req_id: str) -> None:
        """Free the request's slot; anchors of it that still arrive are dropped."""
        self.store.release(req_id)
        self._last_prompt_step.pop(req_id, None)
        self._seen.discard(req_id)

    # Anchors

    def _new_step(self, number: int, rows: Sequence[Rows]) -> Step:
        prompt = [row for row in rows if row.num_rows > 1 or row.req_id not in self._seen]
        for row in prompt:
            self._last_prompt_step[row.req_id] = number
        indices, offset = [], 0
        for row in rows:
            if self._last_prompt_step.get(row.req_id) == number:
                indices.append(np.arange(offset, offset + row.num_rows))
            offset += row.num_rows
            self._seen.add(row.req_id)
        batch = None
        if prompt:
            ids, starts, ends = zip(*((row.req_id, row.start, row.end) for row in prompt), strict=True)
            batch = self.attention.span_batch(ids, starts, ends)
        chosen = np.concatenate(indices) if indices else np.empty(0, np.int64)
        return Step(
            placement=self.store.place(rows),
            prompt=batch,
            prompt_rows=torch.from_numpy(chosen).to(self._device),
            missing=set(self._anchors),
        )

    def _take(self, number: int, stage: int, rows_ANH: Tensor) -> None:
        step = next(step for n, step in self._steps if n == number)
        self.store.write(step.placement, self._anchors[stage], rows_ANH)
        step.missing.discard(stage)
        if step.prompt is not None:
            step.parts[stage] = rows_ANH[:, step.prompt_rows]

    def _finish_steps(self) -> None:
        while self._steps and not self._steps[0][1].missing:
            step = self._steps.popleft()[1]
            if step.prompt is not None:
                self._write_prompt(step, step.prompt)

    def _write_prompt(self, step: Step, batch: RowBatch) -> None:
        """Prompt rows are written once, with the deepest row type."""
        anchors_NAH = torch.cat([step.parts[stage] for stage in self._anchors]).transpose(0, 1)
        deepest = self.module.aggr_projs[-1]
        self.run_layers(deepest(anchors_NAH[:, : self._prefixes[-1]].flatten(1)), batch)

    # Drafts

    def _is_ready(self, row: Rows) -> bool:
        """Whether every stage's anchors of the request's prompt have arrived."""
        first_missing = self._steps[0][0] if self._steps else self._num_steps
        return self._last_prompt_step[row.req_id] < first_missing

    def _draft(self, rows: Sequence[Rows]) -> list[int | None]:
        newest = [row.end - 1 for row in rows]
        slots = [self.store.slot(row.req_id) for row in rows]
        counts = [self._num_rows(row) for row in rows]
        index = [self.attention.batch_index(row.req_id) for row in rows]
        requests = torch.tensor([newest, slots, counts, index], dtype=torch.int32).to(self._device, non_blocking=True)
        table = self.attention.block_table
        drafted = draft_rows(*requests, table, self._type_of_distance, self.attention.block_size, sum(counts))
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        batch = RowBatch(
            positions=drafted.positions,
            slot_mapping=drafted.slot_mapping,
            query_start_loc=drafted.query_start_loc,
            query_start_loc_cpu=torch.from_numpy(starts),
            seq_lens=drafted.seq_lens,
            block_table=table.index_select(0, requests[3]),
            max_query_len=max(counts),
            max_seq_len=max(newest) + 1,
        )
        return self.tokens(rows, self.run_layers(self._fuse(drafted), batch), drafted.newest)

    def _fuse(self, drafted: DraftRows) -> Tensor:
        """The drafter's inputs [N, H]: each row's anchors, concatenated and projected."""
        where = (drafted.slots, drafted.positions, drafted.types)
        if self._packed is None:
            projections = list(self.module.aggr_projs)
            return fused_rows_reference(self.store.data_SWAH, projections, self._prefixes, *where)
        return fused_rows(self.store.data_SWAH, self._packed, self._prefixes, *where, drafted.order)

    def _pack(self) -> Tensor:
        width = len(self.layout.anchors) * self.module.config.hidden_size
        return pack_projections([proj.weight for proj in self.module.aggr_projs], width)

    def _num_rows(self, row: Rows) -> int:
        """Rows of distance 0 … n, as far as the request's own steps reach back."""
        return min(self.layout.num_stages + 1, row.end - self.store.first_position(row.req_id))


def _span(owners: Sequence[int], stage: int) -> slice:
    first = owners.index(stage)
    return slice(first, first + owners.count(stage))
