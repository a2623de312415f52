"""`config.json` of a drafter checkpoint: everything needed to rebuild its layers without the target at hand."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

from vllm_spd.models.rows import RowLayout

__all__ = ["FAMILIES", "HEADS", "KINDS", "PDMConfig"]

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_5")
HEADS = ("own", "tied")
KINDS = ("pdm", "early_exit")
LAYER_VALUES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "initializer_range",
    "rope_parameters",
    "attention_bias",
    "mlp_bias",
    "attention_dropout",
)


class PDMConfig(PretrainedConfig):
    """Configuration of a pipeline draft module. Raises ValueError for values that do not fit together.

    The draft vocabulary itself is the int64 tensor `draft_token_ids` [draft_vocab_size] in model.safetensors: the
    sorted target token ids that the draft head's rows stand for. norm.weight there is the whole factor, also for
    targets whose RMSNorm multiplies by (1 + weight).
    """

    model_type = "spd_pdm"

    base_model: str = ""
    """Name or path of the target, for humans and for the trainer; inference does not read it."""
    kind: str = "pdm"
    """"pdm": rows of every distance. "early_exit": the first stage's output of the newest token only (PPSD)."""
    family: str = "llama"
    head: str = "tied"
    """"own": lm_head.weight is in the checkpoint. "tied": the target's LM-head rows of `draft_token_ids` are used."""

    num_stages: int = 1
    stage_layers: list[int] | None = None
    anchors: list[int] | None = None
    depth_schedule: str = "after_first_stage"
    num_layers: int = 1
    """Decoder layers of the drafter (the target's layer count is the sum of stage_layers)."""
    draft_vocab_size: int = 1

    vocab_size: int = 1
    """Size of the target's vocabulary."""
    hidden_size: int = 64
    intermediate_size: int = 128
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int = 16
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rope_parameters: dict[str, Any] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: float = 0.0

    def __post_init__(self, **kwargs: Any) -> None:
        self.stage_layers = list(self.stage_layers or [1] * self.num_stages)
        self.anchors = list(self.anchors or [0])
        self.rope_parameters = self.rope_parameters or {"rope_type": "default", "rope_theta": 10000.0}
        super().__post_init__(**kwargs)
        check_choice("kind", self.kind, KINDS)
        check_choice("family", self.family, FAMILIES)
        check_choice("head", self.head, HEADS)
        check_sizes(self)
        _ = self.layout

    @property
    def layout(self) -> RowLayout:
        """Which row has which depth and which anchors."""
        return RowLayout(
            num_stages=self.num_stages,
            stage_layers=tuple(self.stage_layers or ()),
            anchors=tuple(self.anchors or ()),
            depth_schedule=self.depth_schedule,
        )

    def layer_values(self) -> dict[str, Any]:
        """The values that a transformers config of `family` needs to build this drafter's decoder layers."""
        return {name: getattr(self, name) for name in LAYER_VALUES}


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}: use one of {', '.join(choices)}.")


def check_sizes(config: PDMConfig) -> None:
    least = 1 if config.kind == "pdm" else 0
    if config.num_layers < least:
        raise ValueError(f"num_layers is {config.num_layers}: a drafter of kind {config.kind} needs at least {least}.")
    if not 1 <= config.draft_vocab_size <= config.vocab_size:
        raise ValueError(
            f"draft_vocab_size is {config.draft_vocab_size}: use 1 to {config.vocab_size}, the target's vocabulary."
        )
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"{config.num_attention_heads} attention heads cannot share {config.num_key_value_heads} key/value heads."
        )


AutoConfig.register("spd_pdm", PDMConfig, exist_ok=True)
