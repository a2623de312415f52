"""Drafter inputs: for each row, gather its anchors from the feature store, concatenate and project them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

__all__ = ["fused_rows", "fused_rows_reference", "pack_projections"]


def pack_projections(weights: Sequence[Tensor], width: int) -> Tensor:
    """One weight [O, prefix·H] per row type → [types, O, width], zeros behind each prefix; `width` is A·H.

    Raises:
        ValueError: a weight is wider than `width`.
    """
    widest = max(weight.shape[1] for weight in weights)
    if widest > width:
        raise ValueError(f"A projection reads {widest} values, but {width} is all that a row has.")
    return torch.stack([pad(weight, (0, width - weight.shape[1])) for weight in weights])


def fused_rows(
    store_SWAH: Tensor,
    projections_TOK: Tensor,
    prefixes: Sequence[int],
    slots_N: Tensor,
    positions_N: Tensor,
    types_N: Tensor,
    order_N: Tensor | None = None,
) -> Tensor:
    """Project the first `prefixes[type]` anchors of every row, concatenated, with the weight of its type.

    Products are accumulated in float32. Rows of type -1 (padding) become zeros, and their slots and positions are not
    read. Inputs may be ragged in any way: rows of all types and requests in any order, none at all.

    Args:
        store_SWAH: anchors by request slot and position modulo window W, contiguous, in the model's dtype.
        projections_TOK: one weight per row type, K = A·H, what lies behind a type's prefix is not read
            (`pack_projections`); same dtype.
        prefixes: anchors that each row type fuses, 1 to A (`RowLayout.row_types`).
        slots_N: request slot of each row, int32 or int64.
        positions_N: position of each row's token, 0 or more, int32 or int64.
        types_N: row type, index into `prefixes` (`RowLayout.projection_index`), int32 or int64; -1 for padding.
        order_N: rows sorted by type, int32 (`DraftRows.order`). Only a hint: it groups rows that share a weight.

    Returns:
        [N, O] in the model's dtype.

    Raises:
        ValueError: shapes or dtypes do not fit together, or a tensor is not contiguous.
    """
    _check(store_SWAH, projections_TOK, prefixes)
    _check_rows(slots_N, positions_N, types_N)
    if not store_SWAH.is_cuda:
        return fused_rows_reference(store_SWAH, projections_TOK, prefixes, slots_N, positions_N, types_N)
    from vllm_spd.kernels.triton_projection import fused_rows_triton

    return fused_rows_triton(store_SWAH, projections_TOK, prefixes, slots_N, positions_N, types_N, order_N)


def fused_rows_reference(
    store_SWAH: Tensor,
    projections_TOK: Tensor | Sequence[Callable[[Tensor], Tensor]],
    prefixes: Sequence[int],
    slots_N: Tensor,
    positions_N: Tensor,
    types_N: Tensor,
) -> Tensor:
    """What `fused_rows` computes, as one gather and one matrix product per row type.

    Instead of packed weights it also takes one callable per row type, [rows, prefix·H] → [rows, H]: CPU inference keeps
    its weights in a layout that only vLLM's own linear layers can read.
    """
    num_slots, window, num_anchors, hidden = store_SWAH.shape
    places = store_SWAH.view(num_slots * window, num_anchors * hidden)
    place_N = slots_N * window + positions_N % window
    num_outputs = projections_TOK.shape[1] if isinstance(projections_TOK, Tensor) else hidden
    out = store_SWAH.new_zeros(len(types_N), num_outputs)
    for row_type, prefix in enumerate(prefixes):
        rows = (types_N == row_type).nonzero().squeeze(1)
        if len(rows):
            anchors = places[:, : prefix * hidden].index_select(0, place_N.index_select(0, rows))
            out.index_copy_(0, rows, _project(projections_TOK, row_type, anchors))
    return out


def _project(
    projections_TOK: Tensor | Sequence[Callable[[Tensor], Tensor]], row_type: int, anchors_NK: Tensor
) -> Tensor:
    if isinstance(projections_TOK, Tensor):
        return linear(anchors_NK, projections_TOK[row_type, :, : anchors_NK.shape[1]])
    return projections_TOK[row_type](anchors_NK)


def _check(store_SWAH: Tensor, projections_TOK: Tensor, prefixes: Sequence[int]) -> None:
    _, _, num_anchors, hidden = store_SWAH.shape
    types, _, width = projections_TOK.shape
    if width != num_anchors * hidden or types != len(prefixes):
        raise ValueError(
            f"Projections of shape {list(projections_TOK.shape)} do not fit {len(prefixes)} row types, {num_anchors} "
            f"anchors and hidden size {hidden}."
        )
    if not all(1 <= prefix <= num_anchors for prefix in prefixes):
        raise ValueError(f"Prefixes {list(prefixes)} must lie between 1 and the number of anchors, {num_anchors}.")
    if store_SWAH.dtype != projections_TOK.dtype:
        raise ValueError(f"The store is {store_SWAH.dtype} and the projections are {projections_TOK.dtype}.")
    if not (store_SWAH.is_contiguous() and projections_TOK.is_contiguous()):
        raise ValueError("The store and the projections must be contiguous.")


def _check_rows(slots_N: Tensor, positions_N: Tensor, types_N: Tensor) -> None:
    rows = (slots_N, positions_N, types_N)
    if len({tensor.shape for tensor in rows}) > 1:
        raise ValueError(f"Inputs per row have shapes {[list(tensor.shape) for tensor in rows]}.")
    if not all(tensor.is_contiguous() for tensor in rows):
        raise ValueError("Inputs per row must be contiguous.")
