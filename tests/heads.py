"""Drafters for the tiny target that are right by construction, so that their acceptance tells whether inputs are."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from vllm_spd.models.checkpoint import expected_shapes, write_checkpoint
from vllm_spd.models.pdm_config import PDMConfig
from vllm_spd.training.families import layer_values_of
from vllm_spd.training.target import Target

__all__ = ["COPIED_STAGES", "copied_head"]

COPIED_STAGES = (7, 1)
VOCAB = torch.arange(512)


def copied_head(folder: Path, target: Target, kind: str, noise: float = 0.0, ids: Tensor = VOCAB) -> Path:
    """A drafter whose only layer and head are the target's last ones: it computes the last stage on the first rank.

    Args:
        folder: to write into.
        target: of 8 layers.
        kind: `pdm` or `early_exit`; the projections of `pdm` pick the output of the first stage.
        noise: standard deviation of what is added to every weight, as a share of the weight's own.
        ids: [V] draft vocabulary.
    """
    boundary, last = COPIED_STAGES[0], sum(COPIED_STAGES) - 1
    config = PDMConfig(
        kind=kind,
        num_stages=2,
        stage_layers=list(COPIED_STAGES),
        anchors=[0, boundary, last + 1] if kind == "pdm" else [0, boundary],
        num_layers=1,
        draft_vocab_size=len(ids),
        head="own",
        **layer_values_of(target.config),
    )
    weights = target.model.state_dict()
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {"norm.weight": target.norm_factor(), "draft_token_ids": ids}
    for name, shape in expected_shapes(config).items():
        if name in tensors:
            continue
        if name.startswith("aggr_projs."):
            tensors[name] = pick(shape, config.anchors.index(boundary))
            continue
        exact = weights["lm_head.weight"][ids] if name == "lm_head.weight" else weights[layer_name(name, last)]
        tensors[name] = exact + noise * exact.std(correction=0) * torch.randn(shape, generator=generator)
    write_checkpoint(folder, config, tensors)
    return folder


def pick(shape: tuple[int, ...], index: int) -> Tensor:
    """Projection [H, A * H] that copies one of its anchors."""
    width = shape[0]
    weight = torch.zeros(shape)
    weight[:, index * width : (index + 1) * width] = torch.eye(width)
    return weight


def layer_name(name: str, layer: int) -> str:
    return name.replace("spec_layers.0.", f"model.layers.{layer}.")
