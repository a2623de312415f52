"""Triton twin of `head.py`: every program finds the best token of its share of the vocabulary, a second launch the best
of those. Logits live in registers only, and the head is read once for up to 64 rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_spd.kernels.head import HeadArgmax
from vllm_spd.kernels.launch import num_multiprocessors, operand, rows_per_tile, values_per_step

__all__ = ["norm_head_argmax_triton"]

BLOCK_TOKENS = 64
NORM_TILE = 8192
"""Values of the rows that a program holds at once while it computes the norm."""


def norm_head_argmax_triton(
    hidden_NH: Tensor,
    norm_weight_H: Tensor,
    epsilon: float,
    head_VH: Tensor,
    token_ids_V: Tensor | None,
    rows_R: Tensor | None,
    residual_NH: Tensor | None,
) -> HeadArgmax:
    """Same arguments and result as `norm_head_argmax`."""
    num_rows = len(hidden_NH if rows_R is None else rows_R)
    num_tokens, hidden = head_VH.shape
    device = hidden_NH.device
    token_R = torch.empty(num_rows, dtype=torch.int64, device=device)
    logit_R = torch.empty(num_rows, dtype=torch.float32, device=device)
    if not num_rows:
        return HeadArgmax(token_R, logit_R)
    block_rows = rows_per_tile(num_rows)
    tiles = triton.cdiv(num_tokens, BLOCK_TOKENS)
    tiles_per_part = triton.cdiv(tiles, 2 * num_multiprocessors(device))
    parts = triton.cdiv(tiles, tiles_per_part)
    logit_RP = torch.empty(num_rows, parts, dtype=torch.float32, device=device)
    index_RP = torch.empty(num_rows, parts, dtype=torch.int32, device=device)
    residual_stride = 0 if residual_NH is None else residual_NH.stride(0)
    # fmt: off
    best_of_part_kernel[triton.cdiv(num_rows, block_rows), parts](
        hidden_NH, residual_NH, rows_R, norm_weight_H, head_VH, logit_RP, index_RP,
        num_rows, hidden, num_tokens, hidden_NH.stride(0), residual_stride, tiles_per_part, epsilon,
        OPERAND=operand(hidden_NH.dtype), HAS_RESIDUAL=residual_NH is not None, HAS_ROWS=rows_R is not None,
        BLOCK_ROWS=block_rows, BLOCK_TOKENS=BLOCK_TOKENS,
        BLOCK_VALUES=values_per_step(block_rows, hidden_NH.element_size()), BLOCK_NORM=NORM_TILE // block_rows,
        num_warps=4, num_stages=4,
    )
    best_of_all_kernel[num_rows,](
        logit_RP, index_RP, token_ids_V, token_R, logit_R, parts,
        HAS_IDS=token_ids_V is not None, BLOCK=triton.next_power_of_2(parts), num_warps=4,
    )
    # fmt: on
    return HeadArgmax(token_R, logit_R)


@triton.jit
def _load_rows(hidden_ptrs, residual_ptrs, values, mask, HAS_RESIDUAL: tl.constexpr):
    """Values of some rows in float32; a residual is added in the rows' own dtype, as the model does."""
    rows = tl.load(hidden_ptrs[:, None] + values[None, :], mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptrs[:, None] + values[None, :], mask=mask, other=0.0)
        rows = (rows.to(tl.float32) + residual.to(tl.float32)).to(rows.dtype)
    return rows.to(tl.float32)


@triton.jit
def best_of_part_kernel(
    hidden_ptr,
    residual_ptr,
    rows_ptr,
    norm_weight_ptr,
    head_ptr,
    logits_ptr,
    indices_ptr,
    num_rows,
    hidden,
    num_tokens,
    hidden_stride,
    residual_stride,
    tiles_per_part,
    epsilon,
    OPERAND: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    BLOCK_NORM: tl.constexpr,
):
    """Highest logit and its index in one part of the vocabulary: [rows, parts], NaN where a logit is NaN."""
    NOWHERE: tl.constexpr = 2147483647
    part = tl.program_id(1)
    targets = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = targets < num_rows
    rows = targets
    if HAS_ROWS:
        rows = tl.load(rows_ptr + targets, mask=inside, other=0)
    rows = rows.to(tl.int64)
    hidden_ptrs = hidden_ptr + rows * hidden_stride
    residual_ptrs = hidden_ptrs
    if HAS_RESIDUAL:
        residual_ptrs = residual_ptr + rows * residual_stride

    squares = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    for first in range(0, hidden, BLOCK_NORM):
        values = first + tl.arange(0, BLOCK_NORM)
        mask = inside[:, None] & (values < hidden)[None, :]
        loaded = _load_rows(hidden_ptrs, residual_ptrs, values, mask, HAS_RESIDUAL)
        squares += tl.sum(loaded * loaded, 1)
    scale = tl.rsqrt(squares / hidden + epsilon)

    best = tl.full((BLOCK_ROWS,), float("-inf"), dtype=tl.float32)
    best_index = tl.full((BLOCK_ROWS,), NOWHERE, dtype=tl.int32)
    broken = tl.zeros((BLOCK_ROWS,), dtype=tl.int32)
    last_tile = tl.minimum((part + 1) * tiles_per_part, tl.cdiv(num_tokens, BLOCK_TOKENS))
    for tile in range(part * tiles_per_part, last_tile):
        tokens = tile * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
        exists = tokens < num_tokens
        head_ptrs = head_ptr + tokens.to(tl.int64) * hidden
        logits = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), dtype=tl.float32)
        for first in range(0, hidden, BLOCK_VALUES):
            values = first + tl.arange(0, BLOCK_VALUES)
            known = values < hidden
            loaded = _load_rows(hidden_ptrs, residual_ptrs, values, inside[:, None] & known[None, :], HAS_RESIDUAL)
            norm_weight = tl.load(norm_weight_ptr + values, mask=known, other=0.0).to(tl.float32)
            normed = (loaded * scale[:, None] * norm_weight[None, :]).to(head_ptr.dtype.element_ty)
            head = tl.load(head_ptrs[None, :] + values[:, None], mask=exists[None, :] & known[:, None], other=0.0)
            logits = tl.dot(normed.to(OPERAND), head.to(OPERAND), logits, input_precision="ieee")
        unknown = logits != logits
        broken = tl.maximum(broken, tl.max((unknown & exists[None, :]).to(tl.int32), 1))
        logits = tl.where(unknown | ~exists[None, :], float("-inf"), logits)
        top = tl.max(logits, 1)
        index = tl.min(tl.where((logits == top[:, None]) & exists[None, :], tokens[None, :], NOWHERE), 1)
        # The first tile always wins over NOWHERE, also when every logit is -inf.
        better = (top > best) | ((top == best) & (index < best_index))
        best = tl.where(better, top, best)
        best_index = tl.where(better, index, best_index)

    results = targets.to(tl.int64) * tl.num_programs(1) + part
    tl.store(logits_ptr + results, tl.where(broken > 0, float("nan"), best), mask=inside)
    tl.store(indices_ptr + results, best_index, mask=inside)


@triton.jit
def best_of_all_kernel(
    logits_ptr,
    indices_ptr,
    token_ids_ptr,
    tokens_ptr,
    best_ptr,
    parts,
    HAS_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Best part of one row, as a target id."""
    NOWHERE: tl.constexpr = 2147483647
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    exists = columns < parts
    logits = tl.load(logits_ptr + row.to(tl.int64) * parts + columns, mask=exists, other=float("-inf"))
    indices = tl.load(indices_ptr + row.to(tl.int64) * parts + columns, mask=exists, other=NOWHERE)
    unknown = logits != logits
    broken = tl.max(unknown.to(tl.int32), 0) > 0
    logits = tl.where(unknown, float("-inf"), logits)
    top = tl.max(logits, 0)
    token = tl.min(tl.where((logits == top) & exists, indices, NOWHERE), 0).to(tl.int64)
    if HAS_IDS:
        token = tl.load(token_ids_ptr + token).to(tl.int64)
    tl.store(tokens_ptr + row, tl.where(broken, -1, token))
    tl.store(best_ptr + row, tl.where(broken, float("nan"), top))
