"""Copies anchors out of the target's layers, for any vLLM decoder whose layers return (hidden, residual)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vllm_spd.models.embedding import called_embedding

__all__ = ["Taps"]


class Taps:
    """A static buffer that the forward pass of this rank's stage fills.

    Forward hooks write into it, in every execution mode: they are traced with the model under torch.compile, and the
    buffer's address never changes, as CUDA graphs need. Anchor 0 is the embedding's output, anchor k > 0 the sum of
    hidden state and residual after layer k, counted from 1, before any final norm.
    """

    def __init__(
        self, model: nn.Module, anchors: Sequence[int], num_layers: int, max_tokens: int, like: torch.Tensor
    ) -> None:
        """
        Args:
            model: this rank's part of the target.
            anchors: the ones that this rank computes.
            num_layers: layers of the whole target.
            max_tokens: most rows in a step.
            like: an empty tensor [H] with the model's dtype and device.

        Raises:
            ValueError: the model has no list of `num_layers` layers, or no embedding.
        """
        self.anchors = tuple(anchors)
        self.buffer_ANH = like.new_zeros(len(self.anchors), max_tokens, like.shape[-1])
        layers = _decoder_layers(model, num_layers) if any(self.anchors) else None
        for index, anchor in enumerate(self.anchors):
            module = called_embedding(model) if anchor == 0 else layers[anchor - 1]  # type: ignore[index]
            module.register_forward_hook(_copy_into(self.buffer_ANH[index]))

    def rows(self, num_tokens: int) -> Tensor:
        """View of the anchors of the step that ran last, [A, N, H]; the next step overwrites it."""
        return self.buffer_ANH[:, :num_tokens]


def _copy_into(buffer_NH: Tensor) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        del module, args
        hidden, residual = output if isinstance(output, tuple) else (output, None)
        value = hidden if residual is None else hidden + residual
        buffer_NH[: value.shape[0]].copy_(value)

    return hook


def _decoder_layers(model: nn.Module, num_layers: int) -> nn.ModuleList:
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise ValueError(f"The target has no list of {num_layers} decoder layers: SPD's drafters cannot read it.")
