"""Triton twin of `metadata.py`: one program per request, one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_spd.kernels.metadata import DraftRows

__all__ = ["draft_rows_triton"]

BLOCK_REQUESTS = 128


def draft_rows_triton(
    newest_R: Tensor,
    slots_R: Tensor,
    counts_R: Tensor,
    block_rows_R: Tensor,
    block_table_XB: Tensor,
    type_of_distance: Tensor,
    block_size: int,
    num_rows: int,
) -> DraftRows:
    """Same arguments and result as `draft_rows`."""
    num_requests, num_distances = len(newest_R), len(type_of_distance)
    rows = _empty(num_requests, num_rows, newest_R.device)
    # fmt: off
    draft_rows_kernel[max(1, num_requests),](
        newest_R, slots_R, counts_R, block_rows_R, block_table_XB, type_of_distance, *rows,
        num_requests, num_rows, num_distances, block_table_XB.stride(0), block_size,
        BLOCK_REQUESTS=BLOCK_REQUESTS, BLOCK_DISTANCES=max(16, triton.next_power_of_2(num_distances)), num_warps=4,
    )
    # fmt: on
    return rows


def _empty(num_requests: int, num_rows: int, device: torch.device) -> DraftRows:
    def int32(length: int) -> Tensor:
        return torch.empty(length, dtype=torch.int32, device=device)

    def int64(length: int) -> Tensor:
        return torch.empty(length, dtype=torch.int64, device=device)

    return DraftRows(
        positions=int64(num_rows),
        types=int32(num_rows),
        slots=int32(num_rows),
        slot_mapping=int64(num_rows),
        order=int32(num_rows),
        query_start_loc=int32(num_requests + 1),
        seq_lens=int32(num_requests),
        newest=int64(num_requests),
    )


@triton.jit
def draft_rows_kernel(
    newest_ptr,
    request_slots_ptr,
    counts_ptr,
    block_rows_ptr,
    block_table_ptr,
    type_of_distance_ptr,
    positions_ptr,
    types_ptr,
    slots_ptr,
    slot_mapping_ptr,
    order_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    newest_rows_ptr,
    num_requests,
    num_rows,
    num_distances,
    block_table_stride,
    block_size,
    BLOCK_REQUESTS: tl.constexpr,
    BLOCK_DISTANCES: tl.constexpr,
):
    """The rows of one request, one per distance, and a share of the padding."""
    request = tl.program_id(0)
    distances = tl.arange(0, BLOCK_DISTANCES)
    rows_before = 0
    rows_total = 0
    # Rows of each distance: of the requests before this one, and of all.
    before = tl.zeros((BLOCK_DISTANCES,), dtype=tl.int32)
    total = tl.zeros((BLOCK_DISTANCES,), dtype=tl.int32)
    for first in range(0, num_requests, BLOCK_REQUESTS):
        requests = first + tl.arange(0, BLOCK_REQUESTS)
        counts = tl.load(counts_ptr + requests, mask=requests < num_requests, other=0).to(tl.int32)
        earlier = requests < request
        exists = counts[:, None] > distances[None, :]
        rows_before += tl.sum(tl.where(earlier, counts, 0), 0)
        rows_total += tl.sum(counts, 0)
        before += tl.sum((exists & earlier[:, None]).to(tl.int32), 0)
        total += tl.sum(exists.to(tl.int32), 0)

    if request < num_requests:
        count = tl.load(counts_ptr + request).to(tl.int32)
        newest = tl.load(newest_ptr + request).to(tl.int64)
        types = tl.load(type_of_distance_ptr + distances, mask=distances < num_distances, other=-1).to(tl.int32)
        rows = rows_before + count - 1 - distances
        real = (distances < count) & (rows < num_rows)

        positions = newest - distances
        table = block_table_ptr + tl.load(block_rows_ptr + request).to(tl.int64) * block_table_stride
        blocks = tl.load(table + positions // block_size, mask=real, other=0).to(tl.int64)
        slot = tl.load(request_slots_ptr + request).to(tl.int32)
        tl.store(positions_ptr + rows, positions, mask=real)
        tl.store(types_ptr + rows, types, mask=real)
        tl.store(slots_ptr + rows, slot + tl.zeros_like(rows), mask=real)
        tl.store(slot_mapping_ptr + rows, blocks * block_size + positions % block_size, mask=real)

        # Place in the order by type: all rows of lower types, then those of this type in earlier requests, then the
        # older ones of this request.
        lower = types[None, :] < types[:, None]
        same = types[None, :] == types[:, None]
        older = (distances[None, :] > distances[:, None]) & (distances[None, :] < count)
        ahead = tl.where(lower, total[None, :], 0) + tl.where(same, before[None, :] + older.to(tl.int32), 0)
        places = tl.sum(ahead, 1)
        tl.store(order_ptr + places, rows, mask=real & (places < num_rows))

        tl.store(query_start_loc_ptr + request + 1, rows_before + count)
        tl.store(seq_lens_ptr + request, (newest + 1).to(tl.int32))
        tl.store(newest_rows_ptr + request, (rows_before + count - 1).to(tl.int64))
    if request == 0:
        tl.store(query_start_loc_ptr, 0)

    for first in range(rows_total + request * BLOCK_DISTANCES, num_rows, tl.num_programs(0) * BLOCK_DISTANCES):
        rows = first + distances
        spare = rows < num_rows
        tl.store(positions_ptr + rows, tl.zeros_like(rows).to(tl.int64), mask=spare)
        tl.store(types_ptr + rows, tl.zeros_like(rows) - 1, mask=spare)
        tl.store(slots_ptr + rows, tl.zeros_like(rows), mask=spare)
        tl.store(slot_mapping_ptr + rows, tl.zeros_like(rows).to(tl.int64) - 1, mask=spare)
        tl.store(order_ptr + rows, rows, mask=spare)
