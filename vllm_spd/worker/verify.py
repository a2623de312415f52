"""Rejection sampling on the last rank: drafts that were drawn from the drafter's distribution are judged by it.

A row whose successor was drafted as x ~ q gets x with probability min(1, p(x) / q(x)), else a token drawn from what p
has more than q. Either way the token is distributed as p, the distribution that vLLM would have sampled from, so it
does not matter whether the scheduler ever dispatched x.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.sampling_params import SamplingType
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.rejection_sampler import rejection_sample

from vllm_spd.messages import StepPlan

if TYPE_CHECKING:
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from vllm_spd.worker.exchange import DraftReceiver

__all__ = ["DraftVerifier", "Drawn", "RejectingSampler", "judge", "sampled_drafts"]


def sampled_drafts(requests: Mapping[str, Any], plan: StepPlan) -> list[str]:
    """The step's requests whose drafts are drawn rather than guessed; the same on the first and on the last rank.

    Args:
        requests: vLLM's states of the rank's requests.
        plan: of the step.
    """
    return [req_id for req_id in plan.draft_req_ids if is_drawn(requests[req_id])]


def is_drawn(state: Any) -> bool:
    """Greedy requests have nothing to draw, and seeded ones shall have the text that they have without SPD."""
    params = state.sampling_params
    return params is not None and params.sampling_type == SamplingType.RANDOM


@dataclass(frozen=True)
class Drawn:
    """Drafts that rows of the batch are judged with.

    Attributes:
        rows: [R] int64, the rows of the batch.
        tokens: [R] int64, the drafts.
        probs_RV: distribution over the draft vocabulary that each was drawn from.
    """

    rows: Tensor
    tokens: Tensor
    probs_RV: Tensor


class DraftVerifier:
    """Takes in what the first rank drew and has it judged when vLLM samples the step."""

    def __init__(self, runner: GPUModelRunner, receiver: DraftReceiver, draft_token_ids: Tensor) -> None:
        """
        Args:
            runner: of the last rank; the last stage of its sampler is wrapped.
            receiver: of the first rank's messages.
            draft_token_ids: [V] int64, target token of each entry of the draft vocabulary.
        """
        self._runner = runner
        self._receiver = receiver
        self._draft_token_ids = draft_token_ids.to(runner.device)
        self._sampler = RejectingSampler(runner.sampler.topk_topp_sampler, self._draft_token_ids)
        runner.sampler.topk_topp_sampler = self._sampler
        self._expected: list[str] = []

    def expect(self, plan: StepPlan) -> None:
        """Post the receive of the step that has just run."""
        self._expected = sampled_drafts(self._runner.requests, plan)
        if self._expected:
            self._receiver.expect(len(self._expected))

    def prepare(self) -> None:
        """Before vLLM samples: wait for the step's drafts and hand over those whose rows are delivered."""
        if not self._expected:
            return
        packed = self._receiver.collect()
        drawn = self._select(packed)
        self._expected = []
        if len(drawn.rows):
            self._sampler.judge_next(drawn, self._runner.input_batch.sampling_metadata)

    def finish(self) -> None:
        """After vLLM sampled: nothing may be left for another step."""
        self._sampler.clear()

    def _select(self, packed: Tensor) -> Drawn:
        batch, discarded = self._runner.input_batch.req_id_to_index, self._runner.discard_request_mask.np
        chosen = packed[:, 0].tolist()
        kept = [
            (batch[req_id], number)
            for number, req_id in enumerate(self._expected)
            if chosen[number] >= 0 and not discarded[batch[req_id]]
        ]
        rows, numbers = torch.tensor(kept, dtype=torch.int64).reshape(-1, 2).to(packed.device).unbind(1)
        packed = packed[numbers]
        return Drawn(rows, self._draft_token_ids[packed[:, 0].long()], packed[:, 1:])


class RejectingSampler(nn.Module):
    """Stands before vLLM's top-k-top-p sampler, where the logits are those that vLLM samples from."""

    def __init__(self, inner: nn.Module, draft_token_ids: Tensor) -> None:
        super().__init__()
        self.inner = inner
        self._draft_token_ids = draft_token_ids
        self._drawn: Drawn | None = None
        self._metadata: SamplingMetadata | None = None

    def judge_next(self, drawn: Drawn, metadata: SamplingMetadata) -> None:
        """Judge these drafts in the next call."""
        self._drawn, self._metadata = drawn, metadata

    def clear(self) -> None:
        """Forget drafts that no call has judged."""
        self._drawn = self._metadata = None

    def forward(
        self, logits_NV: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """vLLM's sample [N] and processed log-probabilities, with the drafted rows' tokens replaced."""
        drawn, metadata = self._drawn, self._metadata
        self.clear()
        if drawn is None or metadata is None:
            return self.inner(logits_NV, generators, k, p)
        rows = drawn.rows
        # vLLM's sampler works in place.
        target = apply_top_k_top_p(logits_NV[rows], None if k is None else k[rows], None if p is None else p[rows])
        sampled, processed = self.inner(logits_NV, generators, k, p)
        tokens = judge(drawn.tokens, self._expand(drawn.probs_RV, target), target, metadata)
        return sampled.index_copy(0, rows, tokens.to(sampled.dtype)), processed

    def _expand(self, probs_RV: Tensor, like: Tensor) -> Tensor:
        """From the draft vocabulary to the target's."""
        return torch.zeros_like(like).index_copy_(1, self._draft_token_ids, probs_RV.to(like.dtype))


def judge(drafts_R: Tensor, draft_probs_RV: Tensor, target_logits_RV: Tensor, metadata: SamplingMetadata) -> Tensor:
    """vLLM's rejection sampling of one draft per row.

    Args:
        drafts_R: token ids, drawn from `draft_probs_RV`.
        draft_probs_RV: float32 distributions over the target's vocabulary.
        target_logits_RV: float32 logits after temperature, masks, top-k and top-p.
        metadata: of the batch; only its form is used.

    Returns:
        [R] token ids, each distributed as the softmax of its logits.
    """
    count, device = len(drafts_R), drafts_R.device
    ones = torch.ones(count, device=device)
    output = rejection_sample(
        drafts_R.to(torch.int32),
        [1] * count,
        1,
        torch.arange(1, count + 1, dtype=torch.int32, device=device),
        draft_probs_RV.contiguous(),
        target_logits_RV.contiguous(),
        torch.zeros(count, 1, dtype=torch.int32, device=device),
        replace(metadata, all_greedy=False, all_random=True, temperature=ones, generators={}),
    )
    return output[:, 0]
