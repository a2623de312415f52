"""Which target layers go to which stage, so that all stages take about the same time. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["StageCosts", "describe", "drafter_parameters", "layer_parameters", "split_layers", "target_costs"]


@dataclass(frozen=True)
class StageCosts:
    """What a stage spends per token, in parameters read: decoding is bound by memory bandwidth.

    Attributes:
        layer: one target layer, its launches included.
        first: what the first stage does besides its layers: the drafter. The embedding is a look-up of one row.
        last: what the last stage does besides its layers: the LM head.
    """

    layer: int
    first: int = 0
    last: int = 0

    def stage(self, index: int, num_stages: int, num_layers: int) -> int:
        """Cost of a stage that holds `num_layers` target layers."""
        extra = (self.first if index == 0 else 0) + (self.last if index == num_stages - 1 else 0)
        return num_layers * self.layer + extra


def split_layers(num_layers: int, num_stages: int, costs: StageCosts) -> tuple[int, ...]:
    """The split whose slowest stage is fastest; among equals, the later stages get the smaller share.

    Raises:
        ValueError: fewer layers than stages.
    """
    if num_layers < num_stages:
        raise ValueError(f"{num_layers} layers cannot fill {num_stages} stages: use at most {num_layers} stages.")
    split = [1] * num_stages
    for _ in range(num_layers - num_stages):
        cheapest = min(range(num_stages), key=lambda index: costs.stage(index, num_stages, split[index] + 1))
        split[cheapest] += 1
    return tuple(split)


def describe(split: Sequence[int], costs: StageCosts) -> str:
    """One line for the log: layers and share of the slowest stage."""
    loads = [costs.stage(index, len(split), count) for index, count in enumerate(split)]
    shares = ", ".join(f"{count} ({load / max(loads):.0%})" for count, load in zip(split, loads, strict=True))
    return f"SPD: target layers per stage {shares} of the slowest stage's work"


def layer_parameters(text_config: Any) -> int:
    """Parameters that one decoder layer reads per token; of a mixture of experts, those of the experts in use.

    Args:
        text_config: Hugging Face config of the target's language model.
    """
    width = text_config.hidden_size
    heads = text_config.num_attention_heads
    head_dim = getattr(text_config, "head_dim", None) or width // heads
    key_heads = getattr(text_config, "num_key_value_heads", None) or heads
    attention = 2 * width * head_dim * (heads + key_heads)
    experts = getattr(text_config, "num_experts_per_tok", None)
    inner = getattr(text_config, "moe_intermediate_size", None) if experts else None
    if inner is None:
        inner, experts = getattr(text_config, "intermediate_size", None) or 4 * width, 1
    return attention + 3 * width * inner * (experts or 1)


LAYER_LAUNCHES = 4_000_000
"""A layer's launches, in parameters read: half of the 0.5 ms that a layer of SmolLM2-135M takes on CPU."""


def drafter_parameters(text_config: Any, num_layers: int, draft_vocab: int, num_anchors: int) -> int:
    """What a drafter reads per cycle, its layers' launches included.

    Args:
        text_config: Hugging Face config of the target's language model.
        num_layers: decoder layers of the drafter.
        draft_vocab: tokens that its head covers.
        num_anchors: anchors that its longest row fuses; the shorter rows together read about as much.
    """
    width = text_config.hidden_size
    layers = num_layers * (layer_parameters(text_config) + LAYER_LAUNCHES)
    return layers + draft_vocab * width + 2 * num_anchors * width * width


def target_costs(text_config: Any, drafter_parameters: int = 0) -> StageCosts:
    """Costs of a target, and of a drafter on the first rank.

    Args:
        text_config: Hugging Face config of the target's language model.
        drafter_parameters: what the drafter reads per cycle.
    """
    head = text_config.hidden_size * text_config.vocab_size
    return StageCosts(layer=layer_parameters(text_config) + LAYER_LAUNCHES, first=drafter_parameters, last=head)
