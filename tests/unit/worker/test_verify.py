"""The rejection sampler's output follows the target whatever the drafter does, and accepts as often as it can."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata

from tests.chisquare import excess
from vllm_spd.drafters.sampling import DraftSampler
from vllm_spd.messages import StepPlan
from vllm_spd.worker.verify import DraftVerifier, Drawn, RejectingSampler, judge, sampled_drafts

N, VOCAB = 40_000, 50


@pytest.fixture(autouse=True, scope="module")
def kernels() -> None:
    """vLLM's workers do this at their start."""
    current_platform.register_triton_kernel_overrides()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(3)


def metadata() -> SamplingMetadata:
    zero = torch.zeros(0)
    return SamplingMetadata(
        temperature=None,
        all_greedy=False,
        all_random=True,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=zero,
        presence_penalties=zero,
        repetition_penalties=zero,
        output_token_ids=[],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


def draw(logits_V: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """N drafts [N] and their distributions [N, V]."""
    sampler = DraftSampler(len(logits_V), seed=0, device=torch.device("cpu"))
    ids = [str(index) for index in range(N)]
    chosen = sampler.draw(ids, logits_V.expand(N, -1), [temperature] * N)
    packed = sampler.take(ids)
    assert packed[:, 0].tolist() == chosen
    return torch.tensor(chosen), packed[:, 1:]


def test_drafts_follow_the_tempered_distribution() -> None:
    logits_V = 2 * torch.randn(VOCAB)
    drafts, probs = draw(logits_V, 0.7)
    assert torch.allclose(probs[0], (logits_V / 0.7).softmax(-1))
    assert excess(drafts, probs[0]) < 5


@pytest.mark.parametrize("closeness", [0.0, 0.7, 1.0])
def test_tokens_follow_the_target_and_acceptance_is_the_overlap(closeness: float) -> None:
    target_V = 2 * torch.randn(VOCAB)
    drafts, probs = draw(closeness * target_V + (1 - closeness) * 2 * torch.randn(VOCAB))
    tokens = judge(drafts, probs, target_V.repeat(N, 1), metadata())
    p = target_V.softmax(-1)
    assert excess(tokens, p) < 5
    overlap = float(torch.minimum(p, probs[0]).sum())
    # A rejected draft is never drawn again, so equal tokens are accepted ones.
    assert float((tokens == drafts).float().mean()) == pytest.approx(overlap, abs=0.015)


def test_the_draft_vocabulary_is_expanded_and_masks_hold() -> None:
    """Fails when the draft is judged before top-k, or by the index in the draft vocabulary (tried)."""
    ids = torch.arange(5, VOCAB, 3)
    target_V = 2 * torch.randn(VOCAB)
    index, probs = draw(target_V[ids] + 0.5 * torch.randn(len(ids)))
    sampler = RejectingSampler(Plain(), ids)
    sampler.judge_next(Drawn(torch.arange(N), ids[index], probs), metadata())
    k, p = torch.full((N,), 20), torch.full((N,), 0.9)
    tokens, _ = sampler(target_V.repeat(N, 1), {}, k, p)
    kept = masked(target_V, 20, 0.9).softmax(-1)
    assert (kept == 0).any()
    assert excess(tokens, kept) < 5


def test_other_rows_and_other_steps_keep_vllms_token() -> None:
    sampler = RejectingSampler(Plain(token=7), torch.arange(4))
    certain = torch.tensor([[0.0, 0.0, 1.0, 0.0]])
    logits_NV = torch.full((3, 10), -100.0).index_fill(1, torch.tensor(2), 100.0)
    sampler.judge_next(Drawn(torch.tensor([1]), torch.tensor([2]), certain), metadata())
    assert sampler(logits_NV, {}, None, None)[0].tolist() == [7, 2, 7]
    assert sampler(logits_NV, {}, None, None)[0].tolist() == [7, 7, 7]


def test_a_draft_without_numbers_is_no_draft() -> None:
    sampler = DraftSampler(3, seed=0, device=torch.device("cpu"))
    logits = torch.tensor([[0.0, 9.0, 0.0], [0.0, float("nan"), 0.0]])
    first, second = sampler.draw(["a", "b"], logits, [0.01, 1.0])
    assert (first, second) == (1, -1)
    assert sampler.take(["b", "c", "a"])[:, 0].tolist() == [-1, -1, 1]
    assert sampler.take(["a"])[:, 0].tolist() == [-1]


def test_greedy_and_seeded_requests_draw_nothing() -> None:
    params = {"greedy": {"temperature": 0}, "seeded": {"seed": 1}, "random": {}}
    requests = {name: SimpleNamespace(sampling_params=SamplingParams(**values)) for name, values in params.items()}
    assert sampled_drafts(requests, StepPlan(draft_req_ids=("seeded", "random", "greedy"))) == ["random"]


def test_only_delivered_rows_with_a_draft_are_judged() -> None:
    """Requests a (stale), b (drafted), c (no draft); a row of d is in the batch and wants no draft."""
    packed = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 1.0], [-1.0, 0.0, 0.0]])
    batch = {"b": 0, "a": 1, "d": 2, "c": 3}
    runner: Any = SimpleNamespace(
        requests={name: SimpleNamespace(sampling_params=SamplingParams()) for name in "abcd"},
        input_batch=SimpleNamespace(req_id_to_index=batch, sampling_metadata=metadata()),
        discard_request_mask=SimpleNamespace(np=np.array([False, True, False, False])),
        sampler=SimpleNamespace(topk_topp_sampler=Plain(token=5)),
        device=torch.device("cpu"),
    )
    receiver: Any = SimpleNamespace(expect=lambda rows: None, collect=lambda: packed)
    verifier = DraftVerifier(runner, receiver, torch.tensor([3, 8]))
    verifier.expect(StepPlan(draft_req_ids=("a", "b", "c")))
    verifier.prepare()
    logits_NV = torch.full((4, 10), -100.0).index_fill(1, torch.tensor(8), 100.0)
    assert runner.sampler.topk_topp_sampler(logits_NV, {}, None, None)[0].tolist() == [8, 5, 5, 5]


class Plain(nn.Module):
    """Stands for vLLM's sampler, and works in place as that does."""

    def __init__(self, token: int = 0) -> None:
        super().__init__()
        self.token = token

    def forward(self, logits_NV: Tensor, *args: Any) -> tuple[Tensor, None]:
        logits_NV.fill_(0)
        return torch.full((len(logits_NV),), self.token), None


def masked(logits_V: Tensor, k: int, p: float) -> Tensor:
    """Top-k, then top-p, written for one row."""
    order = logits_V.argsort(descending=True)[:k]
    probs = logits_V[order].softmax(-1)
    kept = order[probs.cumsum(-1) - probs < p]
    return torch.full_like(logits_V, float("-inf")).index_copy(0, kept, logits_V[kept])
