"""The drafter evaluated the slow and obvious way: cycle by cycle, row by row, from raw tensors, with a plain cache."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_spd.models.pdm_config import PDMConfig


class PlainDrafter:
    """Runs inference cycles as the engine does: n+1 rows a cycle, the deepest of which stays in the cache."""

    def __init__(self, config: PDMConfig, tensors: dict[str, Tensor], head: Tensor) -> None:
        self.config, self.tensors, self.head = config, {k: v.double() for k, v in tensors.items()}, head.double()
        self.cache: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in range(config.num_layers)]

    def cycle(self, anchors_SAH: Tensor, newest: int) -> Tensor:
        """Draft logits [V] when position `newest` holds the newest token."""
        n = self.config.num_stages
        rows = [(newest - distance, distance) for distance in reversed(range(n + 1)) if distance <= newest]
        states = [self.fuse(anchors_SAH[position].double(), distance) for position, distance in rows]
        for index in range(self.config.num_layers):
            states = self.layer(index, rows, states)
        return self.head @ rms(states[-1], self.tensors["norm.weight"], self.config.rms_norm_eps)

    def fuse(self, anchors_AH: Tensor, distance: int) -> Tensor:
        depth = distance if self.config.depth_schedule == "paper" else max(1, distance)
        reached = sum(self.config.stage_layers[:depth])
        usable = [i for i, anchor in enumerate(self.config.anchors) if anchor <= reached]
        width = len(usable) * self.config.hidden_size
        for name, weight in self.tensors.items():
            if name.startswith("aggr_projs") and weight.shape[1] == width:
                return weight @ anchors_AH[usable].flatten()
        raise AssertionError("no projection of that width")

    def layer(self, index: int, rows: list[tuple[int, int]], states: list[Tensor]) -> list[Tensor]:
        """Older rows first; each sees the cache, the older rows of this cycle and itself."""
        current: dict[int, tuple[Tensor, Tensor]] = {}
        results = []
        for (position, distance), x in zip(rows, states, strict=True):
            normed = self.norm(index, "input_layernorm", x)
            current[position] = self.key_value(index, normed, position)
            if distance == self.config.num_stages:
                self.cache[index][position] = current[position]
            seen = {t: kv for t, kv in self.cache[index].items() if t < rows[0][0]} | current
            x = x + self.linear(index, "o_proj", self.attend(index, normed, position, list(seen.values())))
            y = self.norm(index, "post_attention_layernorm", x)
            gate, up = self.w(index, "mlp.gate_proj") @ y, self.w(index, "mlp.up_proj") @ y
            results.append(x + self.w(index, "mlp.down_proj") @ (torch.nn.functional.silu(gate) * up))
        return results

    def attend(self, index: int, normed: Tensor, position: int, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        c = self.config
        query = self.linear(index, "q_proj", normed).view(c.num_attention_heads, -1)
        gate = None
        if c.family == "qwen3_5":
            query, gate = query[:, : c.head_dim], query[:, c.head_dim :]
        query = self.rotate(self.head_norm(index, "q_norm", query), position)
        groups = c.num_attention_heads // c.num_key_value_heads
        out = []
        for head in range(c.num_attention_heads):
            keys = torch.stack([key[head // groups] for key, _ in seen])
            values = torch.stack([value[head // groups] for _, value in seen])
            weights = (keys @ query[head] / c.head_dim**0.5).softmax(0)
            out.append(weights @ values)
        result = torch.stack(out)
        return (result if gate is None else result * gate.sigmoid()).flatten()

    def key_value(self, index: int, normed: Tensor, position: int) -> tuple[Tensor, Tensor]:
        heads = self.config.num_key_value_heads
        key = self.head_norm(index, "k_norm", self.linear(index, "k_proj", normed).view(heads, -1))
        return self.rotate(key, position), self.linear(index, "v_proj", normed).view(heads, -1)

    def rotate(self, x: Tensor, position: int) -> Tensor:
        rope = self.config.rope_parameters
        size = int(self.config.head_dim * rope.get("partial_rotary_factor", 1.0))
        half = size // 2
        angle = position / rope["rope_theta"] ** (torch.arange(half).double() * 2 / size)
        a, b, rest = x[:, :half], x[:, half:size], x[:, size:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), rest], dim=1)

    def norm(self, index: int, name: str, x: Tensor) -> Tensor:
        return rms(x, self.factor(self.tensors[f"spec_layers.{index}.{name}.weight"]), self.config.rms_norm_eps)

    def head_norm(self, index: int, name: str, x: Tensor) -> Tensor:
        weight = self.tensors.get(f"spec_layers.{index}.self_attn.{name}.weight")
        return x if weight is None else rms(x, self.factor(weight), self.config.rms_norm_eps)

    def factor(self, weight: Tensor) -> Tensor:
        return weight + 1 if self.config.family == "qwen3_5" else weight

    def linear(self, index: int, name: str, x: Tensor) -> Tensor:
        bias = self.tensors.get(f"spec_layers.{index}.self_attn.{name}.bias")
        return self.w(index, f"self_attn.{name}") @ x + (0 if bias is None else bias)

    def w(self, index: int, name: str) -> Tensor:
        return self.tensors[f"spec_layers.{index}.{name}.weight"]


def rms(x: Tensor, factor: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * factor


def all_logits(config: PDMConfig, tensors: dict[str, Tensor], head: Tensor, anchors_SAH: Tensor) -> Tensor:
    """Draft logits [S, V] of every cycle of one sequence."""
    drafter = PlainDrafter(config, tensors, head)
    return torch.stack([drafter.cycle(anchors_SAH, newest) for newest in range(anchors_SAH.shape[0])])
