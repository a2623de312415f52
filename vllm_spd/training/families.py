"""The target's family: which transformers layer the drafter is built from, and with which sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3_5TextConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5TextRotaryEmbedding

from vllm_spd.models.pdm_config import LAYER_VALUES, PDMConfig

__all__ = ["FAMILY_OF", "Family", "family_of", "layer_values_of"]


@dataclass(frozen=True)
class Family:
    """The transformers classes of one family."""

    config: type[PretrainedConfig]
    layer: type[nn.Module]
    rotary: type[nn.Module]

    def layer_config(self, config: PDMConfig) -> PretrainedConfig:
        """A config of this family with the drafter's sizes; attention runs through torch's SDPA."""
        count = max(1, config.num_layers)
        values = config.layer_values()
        if config.family != "llama":
            values["layer_types"] = ["full_attention"] * count
        built = self.config(num_hidden_layers=count, **values)
        built._attn_implementation = "sdpa"
        return built


FAMILIES = {
    "llama": Family(LlamaConfig, LlamaDecoderLayer, LlamaRotaryEmbedding),
    "qwen2": Family(Qwen2Config, Qwen2DecoderLayer, Qwen2RotaryEmbedding),
    "qwen3": Family(Qwen3Config, Qwen3DecoderLayer, Qwen3RotaryEmbedding),
    "qwen3_5": Family(Qwen3_5TextConfig, Qwen3_5DecoderLayer, Qwen3_5TextRotaryEmbedding),
}

FAMILY_OF = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "qwen3_next": "qwen3",
    "qwen3_5": "qwen3",
    "qwen3_5_text": "qwen3",
    "qwen3_5_moe": "qwen3",
    "qwen3_5_moe_text": "qwen3",
}
"""Target model_type -> family of a new drafter's layers: MoE and hybrid targets get dense full-attention layers.

Family "qwen3_5" (gated attention, partial rotary embedding) exists for converted checkpoints only.
"""

ONE_PLUS_NORMS = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
"""Targets whose RMSNorm multiplies by (1 + weight)."""

PARTIAL_ROPE = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")
INFERRED = {"attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0}


def family_of(target: PretrainedConfig) -> str:
    """Name of the drafter's family for a target config. Raises ValueError for targets that have none."""
    family = FAMILY_OF.get(target.model_type)
    if family is None:
        raise ValueError(
            f"Targets of type {target.model_type!r} are not supported: use one of {', '.join(sorted(FAMILY_OF))}."
        )
    return family


def layer_values_of(target: PretrainedConfig) -> dict[str, Any]:
    """The target's sizes for the drafter's layers, as PDMConfig fields.

    A mixture-of-experts target without a dense size gets 3 hidden sizes. A partial rotary embedding becomes a whole
    one: Qwen3's dense layer knows no other, and a layer trained from scratch does not mind.
    """
    text = target.get_text_config()
    values: dict[str, Any] = {name: getattr(text, name, INFERRED.get(name)) for name in LAYER_VALUES}
    values["head_dim"] = values["head_dim"] or text.hidden_size // text.num_attention_heads
    values["intermediate_size"] = values["intermediate_size"] or 3 * text.hidden_size
    values["attention_bias"] = bool(values["attention_bias"])
    rope = dict(values["rope_parameters"] or {})
    values["rope_parameters"] = {name: value for name, value in rope.items() if name not in PARTIAL_ROPE}
    return values


def norm_factor_offset(target: PretrainedConfig) -> float:
    """What to add to the target's final norm weight to get the whole factor."""
    return 1.0 if target.model_type in ONE_PLUS_NORMS else 0.0
