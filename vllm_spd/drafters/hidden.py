"""What the drafters that read the target's hidden states have in common: their layers' KV lives in vLLM's cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from vllm_spd.drafters.base import Drafter, Rows
from vllm_spd.kernels import norm_head_argmax

if TYPE_CHECKING:
    from vllm_spd.drafters.sampling import DraftSampler
    from vllm_spd.models.pdm import PDMModule
    from vllm_spd.worker.runner_v1 import DraftAttention
    from vllm_spd.worker.taps import Taps

__all__ = ["HiddenStateDrafter", "RowBatch"]


@dataclass(frozen=True)
class RowBatch:
    """Rows of some requests that the drafter's layers run over; tensors on the device unless said otherwise.

    Attributes:
        positions: [N] int64.
        slot_mapping: [N] int64, where each row's keys and values go.
        query_start_loc: [R + 1] int32, first row of each request; `query_start_loc_cpu` the same on the host.
        seq_lens: [R] int32, tokens in the cache once the rows are written.
        block_table: [R, B] int32.
        max_query_len: most rows of one request.
        max_seq_len: longest sequence.
    """

    positions: Tensor
    slot_mapping: Tensor
    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    block_table: Tensor
    max_query_len: int
    max_seq_len: int


class HiddenStateDrafter(Drafter):
    """Holds the network, the taps of the first rank and the attention that runs over vLLM's KV cache."""

    def __init__(self, module: PDMModule, taps: Taps, attention: DraftAttention) -> None:
        self.module = module
        self.layout = module.layout
        self.taps = taps
        self.attention = attention
        self.sampler: DraftSampler | None = None

    def run_layers(self, rows_NH: Tensor, batch: RowBatch) -> Tensor:
        """Write the rows' keys and values and return their last hidden states [N, H], before the final norm."""
        with self.attention.running(batch):
            return self.module(rows_NH, batch.positions)

    def tokens(self, rows: Sequence[Rows], hidden_NH: Tensor, newest_R: Tensor) -> list[int | None]:
        """The draft of each request, read at its newest row: drawn if it has a temperature, else the best guess."""
        drawn = [index for index, row in enumerate(rows) if row.temperature > 0]
        if self.sampler is None or not drawn:
            return self.best_tokens(hidden_NH, newest_R)
        drafts: list[int | None] = [None] * len(rows)
        best = [index for index, row in enumerate(rows) if row.temperature <= 0]
        if best:
            for index, token in zip(best, self.best_tokens(hidden_NH, newest_R[best]), strict=True):
                drafts[index] = token
        for index, token in zip(drawn, self._draw([rows[i] for i in drawn], hidden_NH[newest_R[drawn]]), strict=True):
            drafts[index] = token
        return drafts

    def _draw(self, rows: Sequence[Rows], hidden_RH: Tensor) -> list[int | None]:
        assert self.sampler is not None
        temperatures = [row.temperature for row in rows]
        chosen = self.sampler.draw([row.req_id for row in rows], self.module.logits(hidden_RH), temperatures)
        tokens = self.module.draft_token_ids[chosen].tolist()
        return [-1 if index < 0 else token for index, token in zip(chosen, tokens, strict=True)]

    def best_tokens(self, hidden_NH: Tensor, newest_R: Tensor) -> list[int | None]:
        """The draft of each request, read at its newest row; -1 where a logit is not a number."""
        if not hidden_NH.is_cuda:
            return self._best_tokens_on_cpu(hidden_NH[newest_R])
        found = norm_head_argmax(
            hidden_NH,
            self.module.norm.weight,
            self.module.config.rms_norm_eps,
            self.module.lm_head.weight,
            self.module.draft_token_ids,
            newest_R,
        )
        return found.token_ids.tolist()

    def _best_tokens_on_cpu(self, hidden_RH: Tensor) -> list[int | None]:
        """Through vLLM's own linear layer: on CPU it has packed the head's weight."""
        best_R, index_R = self.module.logits(hidden_RH).max(-1)
        tokens = self.module.draft_token_ids[index_R].tolist()
        return [-1 if nan else token for token, nan in zip(tokens, best_R.isnan().tolist(), strict=True)]
