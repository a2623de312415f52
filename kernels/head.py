"""The draft itself: final norm, draft head and argmax, without the logits in memory."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import linear, rms_norm

__all__ = ["NO_TOKEN", "HeadArgmax", "norm_head_argmax", "norm_head_argmax_reference"]

NO_TOKEN = -1
"""Result for a row whose logits hold a NaN; the engine takes it as "no draft"."""


class HeadArgmax(NamedTuple):
    """Best token of each row.

    Attributes:
        token_ids: [R] int64, -1 where a logit is NaN.
        logits: [R] float32, the token's logit; NaN where a logit is NaN. Ranks with parts of the head compare by it.
    """

    token_ids: Tensor
    logits: Tensor


def norm_head_argmax(
    hidden_NH: Tensor,
    norm_weight_H: Tensor,
    epsilon: float,
    head_VH: Tensor,
    token_ids_V: Tensor | None = None,
    rows_R: Tensor | None = None,
    residual_NH: Tensor | None = None,
) -> HeadArgmax:
    """RMS norm of some rows, draft head, and the target id of the highest logit; the lowest index wins a tie.

    The norm is computed in float32 and rounded to the model's dtype once. Logits are float32 on CUDA; on CPU they carry
    the rounding of the model's dtype, so near-ties may go another way.

    Args:
        hidden_NH: the drafter's output before the final norm, in the model's dtype, last dimension contiguous.
        norm_weight_H: the norm's whole factor, same dtype.
        epsilon: added to the mean square.
        head_VH: draft head, contiguous, same dtype; V is at least 1.
        token_ids_V: target id of each draft id, int32 or int64; None when the draft vocabulary is the target's.
        rows_R: which rows to read, int32 or int64; None for all (R = N).
        residual_NH: added to `hidden_NH` before the norm; same shape, dtype and contiguity.

    Raises:
        ValueError: shapes or dtypes do not fit together, or a tensor is not contiguous where it must be.
    """
    _check(hidden_NH, norm_weight_H, head_VH, token_ids_V, residual_NH)
    _check_contiguous(hidden_NH, norm_weight_H, head_VH, token_ids_V, rows_R, residual_NH)
    arguments = (hidden_NH, norm_weight_H, epsilon, head_VH, token_ids_V, rows_R, residual_NH)
    if not hidden_NH.is_cuda:
        return norm_head_argmax_reference(*arguments)
    from vllm_spd.kernels.triton_head import norm_head_argmax_triton

    return norm_head_argmax_triton(*arguments)


def norm_head_argmax_reference(
    hidden_NH: Tensor,
    norm_weight_H: Tensor,
    epsilon: float,
    head_VH: Tensor,
    token_ids_V: Tensor | None = None,
    rows_R: Tensor | None = None,
    residual_NH: Tensor | None = None,
) -> HeadArgmax:
    """What `norm_head_argmax` computes, by way of logits [R, V] in the model's dtype."""
    hidden_RH = _pick(hidden_NH, rows_R)
    if residual_NH is not None:
        hidden_RH = hidden_RH + _pick(residual_NH, rows_R)
    logits_RV = linear(rms_norm(hidden_RH, norm_weight_H.shape, norm_weight_H, epsilon), head_VH)
    best_R, index_R = logits_RV.max(-1)
    token_R = index_R if token_ids_V is None else token_ids_V.index_select(0, index_R).long()
    return HeadArgmax(token_R.masked_fill(best_R.isnan(), NO_TOKEN), best_R.float())


def _pick(rows_NH: Tensor, rows_R: Tensor | None) -> Tensor:
    return rows_NH if rows_R is None else rows_NH.index_select(0, rows_R)


def _check(
    hidden_NH: Tensor, norm_weight_H: Tensor, head_VH: Tensor, token_ids_V: Tensor | None, residual_NH: Tensor | None
) -> None:
    hidden = hidden_NH.shape[-1]
    if norm_weight_H.shape != (hidden,) or head_VH.shape[1] != hidden or not len(head_VH):
        raise ValueError(
            f"Rows of {hidden} values do not fit a norm of shape {list(norm_weight_H.shape)} and a head of shape "
            f"{list(head_VH.shape)}."
        )
    if token_ids_V is not None and token_ids_V.shape != (len(head_VH),):
        raise ValueError(f"The head has {len(head_VH)} rows, but {len(token_ids_V)} token ids are given.")
    if residual_NH is not None and residual_NH.shape != hidden_NH.shape:
        raise ValueError(f"The residual has shape {list(residual_NH.shape)}, the rows {list(hidden_NH.shape)}.")
    if {norm_weight_H.dtype, head_VH.dtype} != {hidden_NH.dtype}:
        raise ValueError(
            f"The rows are {hidden_NH.dtype}, the norm is {norm_weight_H.dtype}, the head is {head_VH.dtype}."
        )


def _check_contiguous(hidden_NH: Tensor, *others: Tensor | None) -> None:
    *whole, residual_NH = others
    if not all(tensor is None or tensor.is_contiguous() for tensor in whole):
        raise ValueError("The norm, the head, the token ids and the row indices must be contiguous.")
    if hidden_NH.stride(-1) != 1 or (residual_NH is not None and residual_NH.stride(-1) != 1):
        raise ValueError("Each row must be contiguous.")
