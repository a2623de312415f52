"""The target's token embedding, found without knowing the model."""

from __future__ import annotations

from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

__all__ = ["called_embedding", "token_embedding"]


def token_embedding(model: nn.Module) -> VocabParallelEmbedding:
    """The layer that holds the embedding's rows. Raises ValueError where this rank has none."""
    return _find(model)[1]


def called_embedding(model: nn.Module) -> nn.Module:
    """What the model calls to embed tokens: the layer itself, or vLLM's LoRA wrapper, which bypasses its hooks."""
    return model.get_submodule(_find(model)[0].removesuffix(".base_layer"))


def _find(model: nn.Module) -> tuple[str, VocabParallelEmbedding]:
    for name, module in model.named_modules():
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead):
            return name, module
    raise ValueError("The target has no token embedding on its first rank: SPD's drafters cannot read it.")
