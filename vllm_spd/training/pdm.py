"""The pipeline draft module as a Hugging Face model: the trainable twin of the vLLM module used at inference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import apply_rotary_pos_emb

from vllm_spd.models.pdm_config import PDMConfig
from vllm_spd.training.families import FAMILIES
from vllm_spd.training.mask import merged_blocks, visibility

__all__ = ["PDM", "DraftOutput"]


@dataclass
class DraftOutput:
    """Result of one training forward. R = rows that count for the loss, V = draft vocabulary."""

    loss: Tensor
    """Mean KL(target || draft) over the rows whose target argmax lies in the draft vocabulary; 0 without any."""
    logits: Tensor
    """Draft logits [R, V]."""
    agreed: Tensor
    """Rows whose draft argmax is the target's argmax (int64 scalar)."""
    rows: Tensor
    """All assistant rows R (int64 scalar): agreed / rows is the greedy acceptance rate."""


class PDM(PreTrainedModel):
    """Drafter of kind "pdm" or "early_exit". With head "tied", call `bind_head` with the target's rows first."""

    config_class = PDMConfig
    draft_token_ids: Tensor
    tied_rows: Tensor | None
    base_model_prefix = ""
    _supports_sdpa = True

    def __init__(self, config: PDMConfig) -> None:
        super().__init__(config)
        family = FAMILIES[config.family]
        layer_config = family.layer_config(config)
        width = config.hidden_size
        self.layout = config.layout
        self.aggr_projs = nn.ModuleList(nn.Linear(length * width, width, bias=False) for length in self.row_types)
        self.spec_layers = nn.ModuleList(family.layer(layer_config, index) for index in range(config.num_layers))
        self.norm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.rotary = family.rotary(layer_config)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False) if config.head == "own" else None
        self.register_buffer("draft_token_ids", torch.arange(config.draft_vocab_size))
        self.register_buffer("tied_rows", None, persistent=False)
        self.norm.requires_grad_(False)
        self.post_init()

    @property
    def row_types(self) -> tuple[int, ...]:
        """Anchor-prefix lengths, one per projection; an early-exit drafter has none."""
        return self.layout.row_types if self.config.kind == "pdm" else ()

    def bind_head(self, rows_VH: Tensor) -> None:
        """Use these rows of the target's LM head (of `draft_token_ids`, in that order). Not saved with the model."""
        self.tied_rows = rows_VH.detach()

    def head_rows(self) -> Tensor:
        """The draft head's weight [V, H]. Raises RuntimeError when a tied head was not bound."""
        if self.lm_head is not None:
            return self.lm_head.weight
        if self.tied_rows is None:
            raise RuntimeError(
                "This drafter's head is tied to the target: call bind_head with the target's rows first."
            )
        return self.tied_rows

    def draft_hidden(self, anchors_BSAH: Tensor, position_ids_BS: Tensor, rows_BS: Tensor) -> Tensor:
        """Normalised last hidden states [R, H] of the newest rows chosen by the boolean mask `rows_BS`.

        Padding needs no mask when it stands at the end of each sequence: no earlier query sees it.
        """
        if not torch.is_autocast_enabled(anchors_BSAH.device.type):
            anchors_BSAH = anchors_BSAH.to(self.dtype)
        blocks = self.input_blocks(anchors_BSAH)
        cos_sin = self.rotary(blocks[0], position_ids_BS)
        for index, layer in enumerate(self.spec_layers):
            if index + 1 < len(self.spec_layers):
                blocks = [self.full_layer(layer, blocks, distance, cos_sin) for distance in self.query_distances]
            else:
                return self.norm(self.last_layer(layer, blocks, cos_sin, rows_BS))
        return self.norm(blocks[0][rows_BS])

    @property
    def query_distances(self) -> range:
        """Distances whose rows exist: an early-exit drafter knows the newest one only."""
        return self.layout.distances if self.config.kind == "pdm" else range(1)

    def input_blocks(self, anchors_BSAH: Tensor) -> list[Tensor]:
        """The rows [B, S, H] of every distance; distances with the same anchors share one tensor object."""
        if self.config.kind == "early_exit":
            boundary = self.layout.anchors.index(self.layout.boundary(1))
            return [anchors_BSAH[:, :, boundary]]
        fused = [
            proj(anchors_BSAH[:, :, :length].flatten(2))
            for proj, length in zip(self.aggr_projs, self.row_types, strict=True)
        ]
        return [fused[self.layout.projection_index(distance)] for distance in self.query_distances]

    def full_layer(self, layer: Any, blocks: list[Tensor], distance: int, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        x = blocks[distance]
        x = x + layer.self_attn.o_proj(self.attend(layer, blocks, distance, cos_sin))
        return x + layer.mlp(layer.post_attention_layernorm(x))

    def last_layer(self, layer: Any, blocks: list[Tensor], cos_sin: tuple[Tensor, Tensor], rows_BS: Tensor) -> Tensor:
        attended = self.attend(layer, blocks, 0, cos_sin)[rows_BS]
        x = blocks[0][rows_BS] + layer.self_attn.o_proj(attended)
        return x + layer.mlp(layer.post_attention_layernorm(x))

    def attend(self, layer: Any, blocks: list[Tensor], distance: int, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """Attention output [B, S, heads * head_dim] of the rows of one distance over the rows they may see."""
        attention = layer.self_attn
        groups = merged_blocks(distance, [id(block) for block in blocks])
        query, gate = self.queries(attention, layer.input_layernorm(blocks[distance]))
        query = apply_rotary_pos_emb(query, query, *cos_sin)[0]
        keys, values = [], []
        for first, _ in groups:
            normed = layer.input_layernorm(blocks[first])
            key = self.heads(attention, "k", normed)
            keys.append(apply_rotary_pos_emb(key, key, *cos_sin)[0])
            values.append(self.heads(attention, "v", normed))
        mask = visibility(self.layout, distance, [members for _, members in groups], query.shape[2], query.device)
        out = F.scaled_dot_product_attention(
            query, torch.cat(keys, 2), torch.cat(values, 2), mask, scale=attention.scaling, enable_gqa=True
        )
        out = out.transpose(1, 2).flatten(2)
        return out if gate is None else out * gate.sigmoid()

    def queries(self, attention: Any, x_BSH: Tensor) -> tuple[Tensor, Tensor | None]:
        """(queries [B, heads, S, head_dim], output gate [B, S, heads * head_dim] where the family has one)."""
        if self.config.family != "qwen3_5":
            return self.heads(attention, "q", x_BSH), None
        both = attention.q_proj(x_BSH).unflatten(-1, (-1, 2 * attention.head_dim))
        query, gate = both.chunk(2, dim=-1)
        return attention.q_norm(query).transpose(1, 2), gate.flatten(2)

    def heads(self, attention: Any, kind: str, x_BSH: Tensor) -> Tensor:
        """Plain queries, keys or values [B, heads, S, head_dim], normalised per head where the family does so."""
        x = getattr(attention, f"{kind}_proj")(x_BSH).unflatten(-1, (-1, attention.head_dim))
        norm = getattr(attention, f"{kind}_norm", None)
        return (x if norm is None else norm(x)).transpose(1, 2)

    def forward(
        self,
        anchors: Tensor,
        position_ids: Tensor,
        loss_mask: Tensor,
        final: Tensor,
        target_top1: Tensor,
    ) -> DraftOutput:
        """KL and agreement at the assistant rows.

        anchors [B, S, A, H]; position_ids [B, S]; loss_mask [B, S] bool, true for R rows; final [R, H], the target's
        last hidden state before its norm at those rows; target_top1 [R], the target's argmax there as target token ids.
        """
        rows_RH = self.draft_hidden(anchors, position_ids, loss_mask)
        logits = F.linear(rows_RH, self.head_rows().to(rows_RH.dtype)).float()
        with torch.no_grad():
            hidden = self.norm(final).to(rows_RH.dtype)
            teacher = F.linear(hidden, self.teacher_rows().to(hidden.dtype)).float()
            agreed = self.draft_token_ids[logits.argmax(-1)] == target_top1
            counted = torch.isin(target_top1, self.draft_token_ids)
        loss = (kl_divergence(teacher, logits) * counted).sum() / counted.sum().clamp(min=1)
        return DraftOutput(loss, logits, agreed.sum(), torch.tensor(agreed.numel(), device=agreed.device))

    def teacher_rows(self) -> Tensor:
        """The frozen target's LM-head rows [V, H] of the draft vocabulary."""
        return self.head_rows() if self.tied_rows is None else self.tied_rows


def kl_divergence(teacher_RV: Tensor, draft_RV: Tensor) -> Tensor:
    """KL(teacher || draft) [R] from logits, in fewer passes over [R, V] than two log-softmaxes need."""
    with torch.no_grad():
        p = teacher_RV.softmax(-1)
        constant = (p * teacher_RV).sum(-1) - teacher_RV.logsumexp(-1)
    return constant + draft_RV.logsumexp(-1) - torch.einsum("rv,rv->r", p, draft_RV)


AutoModel.register(PDMConfig, PDM, exist_ok=True)
