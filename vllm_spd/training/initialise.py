"""A new drafter that starts near the target instead of at random."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vllm_spd.models.pdm_config import PDMConfig
from vllm_spd.training.families import family_of, layer_values_of
from vllm_spd.training.pdm import PDM
from vllm_spd.training.target import Target

__all__ = ["bind_target", "check_layers", "new_pdm"]

logger = logging.getLogger(__name__)


def new_pdm(
    target: Target,
    token_ids: Tensor,
    *,
    stage_layers: Sequence[int],
    anchors: Sequence[int],
    depth_schedule: str = "after_first_stage",
    num_layers: int = 1,
    head: str = "tied",
    kind: str = "pdm",
    init_layers: Sequence[int] | None = None,
    intermediate_size: int | None = None,
) -> PDM:
    """A float32 drafter for this target. `init_layers` names the target layers (0 … L-1) to copy; () means random ones.

    Every projection starts as the identity on its deepest anchor, head and norm as the target's.
    Raises ValueError when stages, anchors or layers do not fit the target.
    """
    check_layers(target, stage_layers)
    sizes = layer_values_of(target.config)
    sizes["intermediate_size"] = intermediate_size or sizes["intermediate_size"]
    config = PDMConfig(
        base_model=target.path,
        kind=kind,
        family=family_of(target.config),
        head=head,
        num_stages=len(stage_layers),
        stage_layers=list(stage_layers),
        anchors=list(anchors),
        depth_schedule=depth_schedule,
        num_layers=num_layers,
        draft_vocab_size=len(token_ids),
        **sizes,
    )
    model = PDM(config).float()
    model.draft_token_ids.copy_(token_ids)
    start_projections(model)
    start_norm_and_head(model, target)
    copy_layers(model, target, init_layers)
    return model


def bind_target(model: PDM, target: Target) -> None:
    """Give the drafter the target's LM-head rows: the teacher's head, and its own when that is tied."""
    model.bind_head(target.head_weight[model.draft_token_ids.to(target.head_weight.device)])


def check_layers(target: Target, stage_layers: Sequence[int]) -> None:
    if sum(stage_layers) != target.num_layers:
        raise ValueError(
            f"The stages {list(stage_layers)} hold {sum(stage_layers)} layers, but the target has {target.num_layers}."
        )


@torch.no_grad()
def start_projections(model: PDM) -> None:
    width = model.config.hidden_size
    for projection in model.aggr_projs:
        nn.init.zeros_(projection.weight)
        projection.weight[:, -width:].copy_(torch.eye(width))


@torch.no_grad()
def start_norm_and_head(model: PDM, target: Target) -> None:
    model.norm.weight.copy_(target.norm_factor())
    bind_target(model, target)
    if model.lm_head is not None and model.tied_rows is not None:
        model.lm_head.weight.copy_(model.tied_rows.float())


def default_init_layers(num_target_layers: int, num_layers: int) -> list[int]:
    """Late target layers, the last one included, three apart."""
    return [max(0, num_target_layers - 1 - 3 * step) for step in reversed(range(num_layers))]


@torch.no_grad()
def copy_layers(model: PDM, target: Target, init_layers: Sequence[int] | None) -> None:
    """Copy target layers into the drafter's: late ones by default, where shapes allow it; else layers stay random."""
    if init_layers is None:
        init_layers = default_init_layers(target.num_layers, model.config.num_layers)
        if not all(fits(model.spec_layers[i], target.body.layers[k]) for i, k in enumerate(init_layers)):
            logger.warning(
                "The target's late layers have other shapes than the drafter's: starting from random layers."
            )
            return
    if not init_layers:
        return
    if len(init_layers) != model.config.num_layers or not all(0 <= k < target.num_layers for k in init_layers):
        raise ValueError(
            f"--init-layers {list(init_layers)} must name {model.config.num_layers} target layers "
            f"between 0 and {target.num_layers - 1}."
        )
    for layer, source in zip(model.spec_layers, init_layers, strict=True):
        if not fits(layer, target.body.layers[source]):
            raise ValueError(f"Target layer {source} has other shapes than the drafter's layers: choose another one.")
        layer.load_state_dict({name: value.float() for name, value in target.body.layers[source].state_dict().items()})


def fits(layer: nn.Module, source: nn.Module) -> bool:
    ours, theirs = layer.state_dict(), source.state_dict()
    return ours.keys() == theirs.keys() and all(ours[name].shape == theirs[name].shape for name in ours)
