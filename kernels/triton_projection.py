"""Triton twin of `projection.py`: a matrix product whose left rows are gathered from the store.

The anchors of one place lie side by side in the store, so the concatenation of a prefix is a slice of it. With a few
rows only, time goes into reading the weights: each program reads its part of one type's weight once for up to 64 rows,
and the reduction is split over programs until all multiprocessors have work. A second launch adds the partial sums in a
fixed order, so the result does not vary from run to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_spd.kernels.launch import num_multiprocessors, operand, rows_per_tile, values_per_step

__all__ = ["Plan", "fused_rows_triton", "plan"]

BLOCK_OUT = 32
SUM_BLOCK = 256
SMALLEST_SPLIT = 512
"""Values of a row that one program reduces at least."""
VALUES_PER_ROW = 16
"""A split also has this many values per row, so that partial sums stay a fraction of the weights' bytes."""


class Plan(NamedTuple):
    """Shape of one launch: rows in a tile, values of the reduction per step, values per split, and splits."""

    block_rows: int
    block_values: int
    split_width: int
    splits: int


def plan(num_rows: int, num_out: int, widths: Sequence[int], itemsize: int, multiprocessors: int) -> Plan:
    """Choose the launch for `num_rows` rows, `num_out` outputs and the reduction length of each row type."""
    rows = rows_per_tile(num_rows)
    values = values_per_step(rows, itemsize)
    tiles = triton.cdiv(num_rows, rows) * triton.cdiv(num_out, BLOCK_OUT)
    even_share = triton.cdiv(tiles * sum(widths), 2 * multiprocessors)
    split_width = triton.cdiv(max(even_share, SMALLEST_SPLIT, VALUES_PER_ROW * num_rows), values) * values
    return Plan(rows, values, split_width, triton.cdiv(max(widths), split_width))


def fused_rows_triton(
    store_SWAH: Tensor,
    projections_TOK: Tensor,
    prefixes: Sequence[int],
    slots_N: Tensor,
    positions_N: Tensor,
    types_N: Tensor,
    order_N: Tensor | None,
) -> Tensor:
    """Same arguments and result as `fused_rows`."""
    _, window, num_anchors, hidden = store_SWAH.shape
    num_rows, num_out, device = len(types_N), projections_TOK.shape[1], store_SWAH.device
    out_NO = store_SWAH.new_empty(num_rows, num_out)
    if not out_NO.numel():
        return out_NO
    widths = [prefix * hidden for prefix in prefixes]
    prefixes_T = _on_device(tuple(prefixes), device)
    block_rows, block_values, split_width, splits = plan(
        num_rows, num_out, widths, store_SWAH.element_size(), num_multiprocessors(device)
    )
    sums_PNO = out_NO if splits == 1 else out_NO.new_empty(splits, num_rows, num_out, dtype=torch.float32)
    grid = (triton.cdiv(num_rows, block_rows), triton.cdiv(num_out, BLOCK_OUT), len(prefixes) * splits)
    # fmt: off
    project_kernel[grid](
        store_SWAH, projections_TOK, prefixes_T, slots_N, positions_N, types_N, order_N, sums_PNO,
        num_rows, window, hidden, num_anchors * hidden, num_out, splits, split_width,
        OPERAND=operand(store_SWAH.dtype), HAS_ORDER=order_N is not None,
        BLOCK_ROWS=block_rows, BLOCK_OUT=BLOCK_OUT, BLOCK_VALUES=block_values, num_warps=4, num_stages=4,
    )
    # fmt: on
    if splits > 1:
        add_splits_kernel[num_rows, triton.cdiv(num_out, SUM_BLOCK)](
            sums_PNO, prefixes_T, types_N, out_NO, num_rows, hidden, num_out, split_width, BLOCK=SUM_BLOCK, num_warps=2
        )
    return out_NO


@lru_cache(maxsize=64)
def _on_device(values: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@triton.jit
def project_kernel(
    store_ptr,
    weights_ptr,
    prefixes_ptr,
    slots_ptr,
    positions_ptr,
    types_ptr,
    order_ptr,
    sums_ptr,
    num_rows,
    window,
    hidden,
    row_width,
    num_out,
    splits,
    split_width,
    OPERAND: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
):
    """One tile of rows and outputs, one row type, one split of the reduction: sums [splits, rows, out]."""
    row_type = tl.program_id(2) // splits
    split = tl.program_id(2) % splits
    places = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    outs = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    inside = places < num_rows
    rows = places
    if HAS_ORDER:
        rows = tl.load(order_ptr + places, mask=inside, other=0)
    types = tl.load(types_ptr + rows, mask=inside, other=-1)
    mine = inside & (types == row_type)
    # Padding has no projection: the programs of type 0 write its zeros.
    written = inside & (tl.maximum(types, 0) == row_type)
    start = split * split_width
    # Products, not widths read from memory: the compiler then knows that whole vectors lie within the bound.
    end = tl.minimum(start + split_width, tl.load(prefixes_ptr + row_type) * hidden)
    if (start >= end) | (tl.max(written.to(tl.int32), 0) == 0):
        return

    slots = tl.load(slots_ptr + rows, mask=mine, other=0).to(tl.int64)
    rings = tl.load(positions_ptr + rows, mask=mine, other=0) % window
    sources = store_ptr + (slots * window + rings) * row_width
    weights = weights_ptr + (row_type.to(tl.int64) * num_out + outs) * row_width
    sums = tl.zeros((BLOCK_ROWS, BLOCK_OUT), dtype=tl.float32)
    for first in range(start, end, BLOCK_VALUES):
        values = first + tl.arange(0, BLOCK_VALUES)
        known = values < end
        anchors = tl.load(sources[:, None] + values[None, :], mask=mine[:, None] & known[None, :], other=0.0)
        weight = tl.load(weights[None, :] + values[:, None], mask=(outs < num_out)[None, :] & known[:, None], other=0.0)
        sums = tl.dot(anchors.to(OPERAND), weight.to(OPERAND), sums, input_precision="ieee")

    targets = sums_ptr + (split.to(tl.int64) * num_rows + rows)[:, None] * num_out + outs[None, :]
    tl.store(targets, sums.to(sums_ptr.dtype.element_ty), mask=written[:, None] & (outs < num_out)[None, :])


@triton.jit
def add_splits_kernel(
    sums_ptr,
    prefixes_ptr,
    types_ptr,
    out_ptr,
    num_rows,
    hidden,
    num_out,
    split_width,
    BLOCK: tl.constexpr,
):
    """Add the splits that one row's type has; none for padding."""
    row = tl.program_id(0)
    outs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = outs < num_out
    row_type = tl.load(types_ptr + row)
    width = tl.load(prefixes_ptr + row_type, mask=row_type >= 0, other=0) * hidden
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    sources = sums_ptr + row.to(tl.int64) * num_out + outs
    for _ in range(tl.cdiv(width, split_width)):
        total += tl.load(sources, mask=inside, other=0.0)
        sources += num_rows * num_out
    tl.store(out_ptr + row.to(tl.int64) * num_out + outs, total.to(out_ptr.dtype.element_ty), mask=inside)
