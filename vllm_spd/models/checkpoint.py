"""Drafter checkpoints: a folder of config.json and model.safetensors, and the conversion of the authors' v11 files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from vllm_spd.models.pdm_config import LAYER_VALUES, PDMConfig

__all__ = [
    "CheckpointError",
    "check_checkpoint",
    "check_tensors",
    "convert_v11",
    "expected_shapes",
    "load_config",
    "read_checkpoint",
    "write_checkpoint",
]

WEIGHTS = "model.safetensors"
NEEDED = ("hidden_size", "vocab_size", "draft_vocab_size", "num_stages", "num_spec_layers", "aggr_feature_bound")
V11_FAMILY = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5",
}
"""Target model_type -> family of the authors' layers: hybrid targets keep their gated full attention."""


class CheckpointError(ValueError):
    """A drafter checkpoint, or a file to convert, that is missing, broken or made for something else."""


def load_config(folder: str | Path) -> PDMConfig:
    """Config of a checkpoint folder. Raises CheckpointError for a folder that holds no drafter."""
    folder = Path(folder)
    for name in ("config.json", WEIGHTS):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} has no {name}: give the folder that `vllm-spd train` or `convert` wrote.")
    try:
        content = json.loads((folder / "config.json").read_text())
        if content.get("model_type") == PDMConfig.model_type:
            return PDMConfig.from_pretrained(folder)
    except ValueError as error:
        raise CheckpointError(f"{folder}/config.json is not sound: {error}") from None
    raise CheckpointError(
        f"{folder}/config.json describes no SPD drafter: give the folder that `vllm-spd train` wrote."
    )


def read_checkpoint(folder: str | Path) -> tuple[PDMConfig, dict[str, Tensor]]:
    """Config and checked tensors of a checkpoint folder. Raises CheckpointError when it holds no sound drafter."""
    config = load_config(folder)
    weights = Path(folder) / WEIGHTS
    try:
        tensors = load_file(weights)
    except SafetensorError as error:
        raise _damaged(weights, error) from None
    check_tensors(config, tensors, str(weights))
    return config, tensors


def check_checkpoint(folder: str | Path, target: Any) -> PDMConfig:
    """Config of a checkpoint whose tensors and sizes fit; reads shapes and token ids, not the weights.

    Args:
        folder: checkpoint folder.
        target: text config of the target.

    Raises:
        CheckpointError: the folder holds no sound drafter, or one of another target.
    """
    config = load_config(folder)
    weights = Path(folder) / WEIGHTS
    try:
        with safe_open(weights, "pt") as file:
            tensors = {n: torch.empty(file.get_slice(n).get_shape(), device="meta") for n in file.keys()}  # noqa: SIM118
            if "draft_token_ids" in tensors:
                tensors["draft_token_ids"] = file.get_tensor("draft_token_ids")
    except SafetensorError as error:
        raise _damaged(weights, error) from None
    check_tensors(config, tensors, str(weights))
    _check_target(config, target, str(folder))
    return config


def _damaged(weights: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{weights} is damaged ({error}): copy or train the drafter again.")


def _check_target(config: PDMConfig, target: Any, folder: str) -> None:
    for name in ("hidden_size", "vocab_size"):
        if getattr(target, name) != getattr(config, name):
            raise CheckpointError(
                f"{folder} was trained for a target with {name} {getattr(config, name)}, and this one has "
                f"{getattr(target, name)}: use the drafter of this target."
            )
    if config.layout.total_layers != target.num_hidden_layers:
        raise CheckpointError(
            f"{folder} was trained for a target of {config.layout.total_layers} layers, and this one has "
            f"{target.num_hidden_layers}: use the drafter of this target."
        )
    if config.head == "tied" and not getattr(target, "tie_word_embeddings", False):
        raise CheckpointError(
            f"{folder} ties its head to the target's embedding, which this target does not share with its own head: "
            "train the drafter with `--head own`."
        )


def write_checkpoint(folder: str | Path, config: PDMConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint folder. Raises CheckpointError when tensors and config do not fit together."""
    check_tensors(config, tensors, "the new checkpoint")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS, {"format": "pt"})
    config.architectures = ["PDM"]
    config.save_pretrained(folder)


def expected_shapes(config: PDMConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor a checkpoint of this config holds."""
    width = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"norm.weight": (width,), "draft_token_ids": (config.draft_vocab_size,)}
    if config.kind == "pdm":
        for index, length in enumerate(config.layout.row_types):
            shapes[f"aggr_projs.{index}.weight"] = (width, length * width)
    for index in range(config.num_layers):
        for name, shape in layer_shapes(config).items():
            shapes[f"spec_layers.{index}.{name}"] = shape
    if config.head == "own":
        shapes["lm_head.weight"] = (config.draft_vocab_size, width)
    return shapes


def layer_shapes(config: PDMConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape within one decoder layer, in the family's Hugging Face names."""
    width, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    gated = 2 if config.family == "qwen3_5" else 1
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (gated * queries, width),
        "self_attn.k_proj.weight": (keys, width),
        "self_attn.v_proj.weight": (keys, width),
        "self_attn.o_proj.weight": (width, queries),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    if config.family in ("qwen3", "qwen3_5"):
        shapes |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    if config.family == "qwen2" or config.attention_bias:
        sizes = {"q": gated * queries, "k": keys, "v": keys}
        shapes |= {f"self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
        if config.family != "qwen2":
            shapes["self_attn.o_proj.bias"] = (width,)
    if config.family == "llama" and config.mlp_bias:
        shapes |= {"mlp.gate_proj.bias": (inner,), "mlp.up_proj.bias": (inner,), "mlp.down_proj.bias": (width,)}
    return shapes


def check_tensors(config: PDMConfig, tensors: Mapping[str, Tensor], where: str) -> None:
    """Raises CheckpointError naming the first tensor that is missing, has a wrong shape, or is not expected."""
    wanted = expected_shapes(config)
    for name, shape in wanted.items():
        if name not in tensors:
            raise CheckpointError(f"{where} lacks the tensor {name} {list(shape)}.")
        if tuple(tensors[name].shape) != shape:
            raise CheckpointError(f"{where} holds {name} as {list(tensors[name].shape)}, but {list(shape)} is needed.")
    for name in tensors:
        if name not in wanted:
            raise CheckpointError(f"{where} holds the tensor {name}, which this config has no use for.")
    ids = tensors["draft_token_ids"].long()
    if bool((ids.diff() <= 0).any()) or int(ids[0]) < 0 or int(ids[-1]) >= config.vocab_size:
        raise CheckpointError(
            f"draft_token_ids in {where} must be increasing ids of the target's {config.vocab_size} tokens."
        )


def convert_v11(source: str | Path, out: str | Path, target: str | None = None) -> PDMConfig:
    """Convert an authors' file, using the target's config and final norm. Returns the new checkpoint's config.

    Raises CheckpointError for a file of another version, with missing keys or with wrong shapes.
    """
    values, state = load_v11(Path(source))
    target_path = target or str(values.get("base_model_path") or "")
    if not target_path:
        raise CheckpointError(f"{source} names no target: pass --target with the target's folder or name.")
    base = AutoConfig.from_pretrained(target_path).get_text_config()
    config = v11_config(values, base, target_path, str(source))
    tensors = v11_tensors(values, state, config, str(source))
    factor, offset = read_final_norm(target_path), 1.0 if config.family == "qwen3_5" else 0.0
    tensors["norm.weight"] = (factor.float() + offset).to(tensors["lm_head.weight"].dtype)
    write_checkpoint(out, config, tensors)
    return config


def load_v11(source: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(config, state dict) of an authors' file, unpickled with weights_only=True."""
    if not source.is_file():
        raise FileNotFoundError(f"{source} does not exist: give an authors' .pt file.")
    try:
        content = torch.load(source, map_location="cpu", weights_only=True)
    except Exception:  # a file of some other kind makes the unpickler fail in any way it likes
        raise CheckpointError(f"{source} is not a PyTorch file of plain tensors: nothing else is loaded.") from None
    if not isinstance(content, dict) or "state_dict" not in content or "config" not in content:
        raise CheckpointError(f"{source} is not an authors' file: it must hold state_dict and config.")
    values, state = content["config"], content["state_dict"]
    version = values.get("version")
    if version not in (11, 12):
        raise CheckpointError(
            f"{source} has version {version}: only version 11 files can be converted (v10 works differently)."
        )
    missing = [name for name in NEEDED if name not in values]
    if missing:
        raise CheckpointError(
            f"The config in {source} lacks {', '.join(missing)}: it is not a complete version 11 file."
        )
    if not values.get("trained_with_use_deepest", True):
        raise CheckpointError(
            f"{source} was trained without deepest rows, which this drafter always uses: it cannot be converted."
        )
    return values, state


def v11_config(values: Mapping[str, Any], base: PretrainedConfig, target_path: str, source: str) -> PDMConfig:
    family = V11_FAMILY.get(base.model_type)
    if family is None:
        raise CheckpointError(
            f"Targets of type {base.model_type!r} cannot be converted: use one of {', '.join(V11_FAMILY)}."
        )
    if (values["hidden_size"], values["vocab_size"]) != (base.hidden_size, base.vocab_size):
        raise CheckpointError(
            f"{source} was made for another target than {target_path}: hidden size or vocabulary differ."
        )
    sizes = {name: getattr(base, name) for name in LAYER_VALUES if getattr(base, name, None) is not None}
    sizes.setdefault("head_dim", base.hidden_size // base.num_attention_heads)
    sizes.setdefault("intermediate_size", values.get("spec_intermediate_size_fallback"))
    return PDMConfig(
        base_model=target_path,
        family=family,
        head="own",
        num_stages=values["num_stages"],
        stage_layers=v11_stages(values, base.num_hidden_layers, source),
        anchors=list(values["aggr_feature_bound"]),
        depth_schedule="paper",
        num_layers=values["num_spec_layers"],
        draft_vocab_size=values["draft_vocab_size"],
        **sizes,
    )


def v11_stages(values: Mapping[str, Any], num_layers: int, source: str) -> list[int]:
    stages: Sequence[int] | None = values.get("stage_layers")
    if stages:
        return list(stages)
    if num_layers % values["num_stages"]:
        raise CheckpointError(
            f"{source} splits {num_layers} layers into {values['num_stages']} unequal stages without saying how."
        )
    return [num_layers // values["num_stages"]] * values["num_stages"]


def v11_tensors(
    values: Mapping[str, Any], state: Mapping[str, Tensor], config: PDMConfig, source: str
) -> dict[str, Tensor]:
    """The file's tensors under this project's names, without rotary buffers and projections that no row uses."""
    count = values.get("num_aggr_types", len(config.anchors or ()))
    if count != len(config.anchors or ()):
        raise CheckpointError(
            f"{source} has {count} row types and {len(config.anchors or ())} anchors: they must be as many."
        )
    tensors = {name: tensor for name, tensor in state.items() if name.startswith(("spec_layers.", "lm_head."))}
    tensors = {name: tensor for name, tensor in tensors.items() if "rotary" not in name}
    for index, length in enumerate(config.layout.row_types):
        name = f"aggr_projs.{length - 1}.weight"
        if name not in state:
            raise CheckpointError(f"{source} lacks the tensor {name}.")
        tensors[f"aggr_projs.{index}.weight"] = state[name]
    if "lm_head.weight" not in tensors:
        raise CheckpointError(f"{source} lacks the tensor lm_head.weight.")
    ids = values.get("draft_token_ids", state.get("draft_token_ids"))
    if ids is None and config.draft_vocab_size != config.vocab_size:
        raise CheckpointError(
            f"{source} has a draft vocabulary of {config.draft_vocab_size} tokens but lacks draft_token_ids."
        )
    ids = torch.arange(config.vocab_size) if ids is None else torch.as_tensor(ids).long()
    order = ids.argsort()
    check_rows(tensors["lm_head.weight"], ids, source)
    return tensors | {"draft_token_ids": ids[order], "lm_head.weight": tensors["lm_head.weight"][order]}


def check_rows(head: Tensor, ids: Tensor, source: str) -> None:
    if head.shape[0] != ids.numel():
        raise CheckpointError(f"{source} has {head.shape[0]} rows in lm_head.weight for {ids.numel()} draft tokens.")


def read_final_norm(target: str) -> Tensor:
    """Weight [H] of the target's final norm, read without loading the rest of it."""
    folder = Path(target)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(target, allow_patterns=["*.json", "*.safetensors"]))
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if name in ("model.norm.weight", "model.language_model.norm.weight", "norm.weight"):
                    return tensors.get_tensor(name)
    raise CheckpointError(f"{target} holds no final norm (model.norm.weight) in its safetensors files.")
