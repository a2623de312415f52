"""The drafters' network as a vLLM module: parallel layers, and KV in vLLM's own cache."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.llama import LlamaDecoderLayer
from vllm.model_executor.models.qwen2 import Qwen2DecoderLayer
from vllm.model_executor.models.qwen3 import Qwen3DecoderLayer

from vllm_spd.models.checkpoint import read_checkpoint
from vllm_spd.models.embedding import token_embedding
from vllm_spd.models.pdm_config import PDMConfig
from vllm_spd.training.families import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["PDMModule", "load_pdm"]

STACKED = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
"""Checkpoint name → name and shard of vLLM's merged linear layer."""


class PDMModule(nn.Module):
    """Projections, decoder layers, final norm and draft head of a `pdm` or `early_exit` checkpoint.

    The decoder layers are vLLM's own of the target's family. They are numbered from the target's layer count upwards,
    because vLLM finds the KV cache of an attention layer by the number in its name.
    """

    def __init__(self, vllm_config: VllmConfig, config: PDMConfig) -> None:
        super().__init__()
        self.config = config
        self.layout = config.layout
        width = config.hidden_size
        types = self.layout.row_types if config.kind == "pdm" else ()
        # Every rank of a tensor-parallel group holds these whole. On CUDA the project's kernels read the weights.
        self.aggr_projs = nn.ModuleList(_linear(length * width, width) for length in types)
        first = self.layout.total_layers
        names = [f"spd_drafter.layers.{first + index}" for index in range(config.num_layers)]
        self.spec_layers = nn.ModuleList(_layer(vllm_config, config, name) for name in names)
        self.attention_names = [f"{name}.self_attn.attn" for name in names]
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.lm_head = _linear(width, config.draft_vocab_size)
        self.register_buffer("draft_token_ids", torch.zeros(config.draft_vocab_size, dtype=torch.int64))

    def forward(self, rows_NH: Tensor, positions_N: Tensor) -> Tensor:
        """Run the decoder layers over fused rows; needs a forward context with the attention metadata of the rows.

        Returns:
            [N, H], before the final norm.
        """
        hidden, residual = rows_NH, None
        for layer in self.spec_layers:
            hidden, residual = layer(positions_N, hidden, residual)
        return hidden if residual is None else hidden + residual

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Draft logits [R, V] over the draft vocabulary."""
        return self.lm_head(self.norm(hidden_RH))

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the checkpoint's tensors, sharded as vLLM's layers want them."""
        parameters = dict(self.named_parameters()) | dict(self.named_buffers())
        for name, tensor in tensors.items():
            merged, shard = _merged_name(name)
            parameter = parameters[merged]
            loader = getattr(parameter, "weight_loader", default_weight_loader)
            loader(parameter, tensor, *shard)


def load_pdm(vllm_config: VllmConfig, folder: str, target: nn.Module) -> PDMModule:
    """Build the module on the first rank and load a checkpoint folder into it.

    Args:
        vllm_config: of the engine; the drafter itself is never quantised.
        folder: checkpoint folder.
        target: the first rank's part of the target; a tied head takes its rows from the embedding.

    Raises:
        CheckpointError: the checkpoint is damaged. That it fits the target was checked before any worker started.
    """
    config, tensors = read_checkpoint(folder)
    model_config = vllm_config.model_config
    plain = copy.copy(vllm_config)
    plain.quant_config = None
    device = torch.device(vllm_config.device_config.device)
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(model_config.dtype)
    try:
        with set_current_vllm_config(plain), device:
            module = PDMModule(plain, config)
            if config.head == "tied":
                ids = tensors["draft_token_ids"].to(device)
                tensors["lm_head.weight"] = token_embedding(target)(ids).detach()
            module.load_tensors(tensors)
            process_weights_after_loading(module, model_config, device)
    finally:
        torch.set_default_dtype(dtype)
    return module.eval().requires_grad_(False)


def _linear(num_inputs: int, num_outputs: int) -> ReplicatedLinear:
    return ReplicatedLinear(num_inputs, num_outputs, bias=False, return_bias=False)


def _layer(vllm_config: VllmConfig, config: PDMConfig, name: str) -> nn.Module:
    hf_config: Any = FAMILIES[config.family].layer_config(config)
    if config.family == "llama":
        return LlamaDecoderLayer(vllm_config, prefix=name, config=hf_config)
    layers = {"qwen2": Qwen2DecoderLayer, "qwen3": Qwen3DecoderLayer}
    return layers[config.family](hf_config, vllm_config.cache_config, None, prefix=name)


def _merged_name(name: str) -> tuple[str, tuple[Any, ...]]:
    for part, (merged, shard) in STACKED.items():
        if f".{part}." in name:
            return name.replace(f".{part}.", f".{merged}."), (shard,)
    return name, ()
