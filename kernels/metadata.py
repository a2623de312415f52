"""The drafter's batch of one cycle: which rows it has, where their keys and values go, how long every sequence is."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["PADDING", "DraftRows", "draft_rows", "draft_rows_reference"]

PADDING = -1
"""Row type and KV slot of rows that only fill the batch up; vLLM's attention skips that slot."""


class DraftRows(NamedTuple):
    """Rows request by request, oldest position first, then padding; all tensors on the device of the inputs.

    Attributes:
        positions: [N] int64, position of each row's token; 0 for padding.
        types: [N] int32, row type (which projection); -1 for padding.
        slots: [N] int32, the request's slot in the feature store; 0 for padding.
        slot_mapping: [N] int64, where the row's keys and values go in the KV cache; -1 for padding.
        order: [N] int32, the rows sorted by type (stable, padding last): see `fused_rows`.
        query_start_loc: [R + 1] int32, first row of each request, and the number of real rows.
        seq_lens: [R] int32, tokens in the drafter's KV cache once the rows are written: newest position + 1.
        newest: [R] int64, index of each request's newest row, where the draft is read.
    """

    positions: Tensor
    types: Tensor
    slots: Tensor
    slot_mapping: Tensor
    order: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    newest: Tensor


def draft_rows(
    newest_R: Tensor,
    slots_R: Tensor,
    counts_R: Tensor,
    block_rows_R: Tensor,
    block_table_XB: Tensor,
    type_of_distance: Tensor,
    block_size: int,
    num_rows: int | None = None,
) -> DraftRows:
    """Lay out one cycle: the rows of distance counts-1 … 0 for each request.

    The four per-request inputs may be rows of one tensor that was copied to the device at once.

    Args:
        newest_R: position p of each request's newest token, int32 or int64.
        slots_R: the request's slot in the feature store, int32 or int64.
        counts_R: how many rows exist, newest backwards: 1 to min(n, p) + 1, int32 or int64.
        block_rows_R: the request's row in `block_table_XB`, int32 or int64.
        block_table_XB: KV block numbers by sequence block, int32; covers every row's position. Rows may be strided.
        type_of_distance: [n + 1] int32, row type of distance δ (`RowLayout.projection_index`).
        block_size: tokens in a KV block.
        num_rows: N, at least the sum of `counts_R`; the rest is padding. By default R·(n + 1), which never waits for
            the device.

    Raises:
        ValueError: the per-request inputs differ in length, an input is not contiguous, or `num_rows` is too small; on
            CUDA, where the counts are not at hand, rows beyond `num_rows` are dropped instead.
    """
    requests = (newest_R, slots_R, counts_R, block_rows_R)
    _check(*requests, block_table_XB, type_of_distance)
    if num_rows is None:
        num_rows = len(newest_R) * len(type_of_distance)
    arguments = (*requests, block_table_XB, type_of_distance, block_size, num_rows)
    if not newest_R.is_cuda:
        return draft_rows_reference(*arguments)
    from vllm_spd.kernels.triton_metadata import draft_rows_triton

    return draft_rows_triton(*arguments)


def draft_rows_reference(
    newest_R: Tensor,
    slots_R: Tensor,
    counts_R: Tensor,
    block_rows_R: Tensor,
    block_table_XB: Tensor,
    type_of_distance: Tensor,
    block_size: int,
    num_rows: int,
) -> DraftRows:
    """What `draft_rows` computes; reads the number of rows back from the device."""
    ends_R = counts_R.cumsum(0)
    total = int(ends_R[-1]) if len(ends_R) else 0
    if total > num_rows:
        raise ValueError(f"num_rows is {num_rows}, but there are {total} rows.")
    request_N = torch.repeat_interleave(counts_R, output_size=total)
    distance_N = ends_R[request_N] - 1 - torch.arange(total, device=ends_R.device)
    position_N = newest_R[request_N] - distance_N
    types_N = type_of_distance[distance_N]
    block_N = block_table_XB[block_rows_R[request_N], position_N // block_size]
    padding = num_rows - total
    return DraftRows(
        positions=_padded(position_N, torch.int64, padding, 0),
        types=_padded(types_N, torch.int32, padding, PADDING),
        slots=_padded(slots_R[request_N], torch.int32, padding, 0),
        slot_mapping=_padded(block_N * block_size + position_N % block_size, torch.int64, padding, PADDING),
        order=_order(types_N, num_rows),
        query_start_loc=torch.nn.functional.pad(ends_R, (1, 0)).to(torch.int32),
        seq_lens=(newest_R + 1).to(torch.int32),
        newest=ends_R - 1,
    )


def _check(
    newest_R: Tensor,
    slots_R: Tensor,
    counts_R: Tensor,
    block_rows_R: Tensor,
    block_table_XB: Tensor,
    type_of_distance: Tensor,
) -> None:
    requests = (newest_R, slots_R, counts_R, block_rows_R)
    if len({tensor.shape for tensor in requests}) > 1:
        raise ValueError(f"Inputs per request have shapes {[list(tensor.shape) for tensor in requests]}.")
    if not all(tensor.is_contiguous() for tensor in (*requests, type_of_distance)) or block_table_XB.stride(1) != 1:
        raise ValueError("The inputs per request, the types and the block table's rows must be contiguous.")


def _padded(values: Tensor, dtype: torch.dtype, count: int, value: int) -> Tensor:
    values = values.to(dtype)
    return torch.nn.functional.pad(values, (0, count), value=value) if count else values


def _order(types: Tensor, num_rows: int) -> Tensor:
    padding = torch.arange(len(types), num_rows, device=types.device)
    return torch.cat([types.argsort(stable=True), padding]).to(torch.int32)
