"""The frozen target: one forward gives every anchor and the teacher's distribution."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from vllm_spd.training.families import family_of, norm_factor_offset

__all__ = ["Target", "Teaching"]


@dataclass
class Teaching:
    """What the target says at R chosen rows."""

    hidden: Tensor
    """Normed final state [R, H]: times an LM-head row it gives that token's logit."""
    top1: Tensor
    """Argmax over the whole vocabulary [R] int64."""
    logsumexp: Tensor
    """Of the whole vocabulary's logits [R] float32, so that probabilities of single tokens can be had later."""


class Target:
    """A frozen causal LM with access to its layers.

    Hidden state k is layer k's output, for the last layer before the final norm; 0 is the embedding output.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, path: str = "") -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.path = path
        self.config = model.config.get_text_config()
        family_of(self.config)
        self.body = find_body(model)
        self.head_weight: Tensor = model.get_output_embeddings().weight

    @classmethod
    def load(cls, path: str, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> Target:
        """Load from a Hugging Face folder or name. Raises ValueError when the tokenizer does not fit the model."""
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device)
        tokenizer = AutoTokenizer.from_pretrained(path)
        vocab = model.get_output_embeddings().weight.shape[0]
        if len(tokenizer) > vocab:
            raise ValueError(
                f"The tokenizer in {path} knows {len(tokenizer)} tokens, the model only {vocab}: use its own one."
            )
        return cls(model, tokenizer, path)

    @property
    def num_layers(self) -> int:
        return len(self.body.layers)

    def norm_factor(self) -> Tensor:
        """The final RMSNorm's whole factor [H]."""
        return self.body.norm.weight.float() + norm_factor_offset(self.config)

    @torch.no_grad()
    def hidden_states(self, input_ids_BS: Tensor, layers: Sequence[int]) -> Tensor:
        """Hidden states [B, S, len(layers), H] of right-padded sequences (padding changes no earlier position)."""
        found: dict[int, Tensor] = {}
        with self.tapped(layers, found):
            self.body(input_ids=input_ids_BS, use_cache=False)
        return torch.stack([found[layer] for layer in layers], dim=2)

    @torch.no_grad()
    def teach(self, final_RH: Tensor, chunk: int = 1024) -> Teaching:
        """Teacher values for rows of hidden state L (before the norm); logits exist for `chunk` rows at a time."""
        hidden = self.body.norm(final_RH)
        top1, logsumexp = [], []
        for part in hidden.split(chunk):
            logits = nn.functional.linear(part, self.head_weight).float()
            top1.append(logits.argmax(-1))
            logsumexp.append(logits.logsumexp(-1))
        return Teaching(hidden, torch.cat(top1), torch.cat(logsumexp))

    @contextmanager
    def tapped(self, layers: Sequence[int], found: dict[int, Tensor]) -> Iterator[None]:
        """Within this context, a forward of the body leaves the wanted hidden states in `found`."""
        handles = [self.tap(layer, found) for layer in set(layers)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def tap(self, layer: int, found: dict[int, Tensor]) -> Any:
        if not 0 <= layer <= self.num_layers:
            raise ValueError(f"Hidden state {layer} does not exist: this target has {self.num_layers} layers.")

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found[layer] = args[0] if args else kwargs["hidden_states"]

        def after(_: nn.Module, __: Any, output: Any) -> None:
            found[layer] = output[0] if isinstance(output, tuple) else output

        if layer < self.num_layers:
            return self.body.layers[layer].register_forward_pre_hook(before, with_kwargs=True)
        return self.body.layers[-1].register_forward_hook(after)

    def fingerprint(self) -> str:
        """Hash of the architecture and of some 64 values of every weight: cheap, and it notices another model."""
        digest = hashlib.sha256(self.config.model_type.encode())
        for name, weight in sorted(self.model.state_dict().items()):
            flat = weight.reshape(-1)
            picked = flat[:: max(1, flat.numel() // 64)]
            digest.update(f"{name}{tuple(weight.shape)}".encode())
            digest.update(picked.float().cpu().numpy().tobytes())
        return digest.hexdigest()


def find_body(model: PreTrainedModel) -> Any:
    """The module that holds `layers` and `norm`, also inside a multimodal wrapper."""
    body: Any = model.get_decoder()
    body = getattr(body, "language_model", body)
    if not hasattr(body, "layers") or not hasattr(body, "norm"):
        raise ValueError(f"{type(model).__name__} has no layers and norm where they are expected: it is not supported.")
    return body
