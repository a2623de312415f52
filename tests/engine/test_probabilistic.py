"""Drafts drawn at the request's temperature: the text keeps the target's distribution, and more drafts are right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.chisquare import excess
from tests.engines import PLAIN, EnginePool, EngineProcess
from tests.heads import copied_head
from vllm_spd.training.target import Target

PROMPT = (11, 402, 77, 300)
COUNT = 20_000
ACCEPTED, DRAFTED = "vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_draft_tokens"


@pytest.fixture(scope="module")
def head(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An early exit that nearly is the target's last stage."""
    ids = torch.arange(0, 512, 5).repeat(4).add(torch.arange(4).repeat_interleave(103)).clamp(max=511).unique()
    return copied_head(tmp_path_factory.mktemp("heads") / "noisy", target, "early_exit", noise=0.3, ids=ids)


@pytest.fixture(scope="module")
def probabilistic(tiny: Path, head: Path) -> Iterator[EngineProcess]:
    config = {"method": "spd", "model": str(head), "draft_sample_method": "probabilistic"}
    with EngineProcess(
        model=str(tiny), dtype="float32", pipeline_parallel_size=2, max_num_seqs=512, speculative_config=config
    ) as engine:
        yield engine


CASES: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.8, "top_k": 30, "logit_bias": {40: 3.0}})


@pytest.mark.parametrize("params", CASES, ids=("plain", "with top-k, bias and temperature"))
@pytest.mark.timeout(600)
def test_text_keeps_the_targets_distribution(
    params: dict[str, Any], probabilistic: EngineProcess, target: Target
) -> None:
    """Three tokens each, of which two are judged: each against its exact distribution, computed without vLLM.

    Fails when every draft is accepted unseen (tried).
    """
    tokens = sample(probabilistic, COUNT, params)
    first = masked(logits_after(target, torch.tensor([PROMPT])), params)[0].softmax(-1)
    assert excess(tokens[:, 0], first) < 5
    possible = first.nonzero()[:, 0]
    prefixes = torch.cat([torch.tensor(PROMPT).repeat(len(possible), 1), possible[:, None]], dim=1)
    second = first[possible] @ masked(logits_after(target, prefixes), params).softmax(-1)
    assert excess(tokens[:, 1], second) < 5


@pytest.mark.timeout(600)
def test_more_drafts_are_right_than_best_guesses(probabilistic: EngineProcess) -> None:
    """Requests with a seed are drafted by best guesses."""
    assert acceptance(probabilistic, seed=None) > 1.2 * acceptance(probabilistic, seed=1)


@pytest.mark.timeout(600)
def test_greedy_and_seeded_requests_keep_their_text(
    engines: EnginePool, probabilistic: EngineProcess, tiny: Path
) -> None:
    params: list[Mapping[str, Any]] = [{"temperature": 0}, {"seed": 3}, {"temperature": 1.0}] * 4
    params = [{**one, "max_tokens": 20, "ignore_eos": True} for one in params]
    prompts = [[*PROMPT, index] for index in range(len(params))]
    expected = engines.get(model=str(tiny), **PLAIN).generate(prompts, params)
    actual = probabilistic.generate(prompts, params)
    for index, (left, right) in enumerate(zip(expected, actual, strict=True)):
        assert len(right.token_ids) == 20
        assert index % 3 == 2 or left.token_ids == right.token_ids


def sample(spd: EngineProcess, count: int, params: Mapping[str, Any]) -> Tensor:
    """[count, 3] output tokens."""
    values = {"temperature": 1.0, "max_tokens": 3, "ignore_eos": True, **params}
    return torch.tensor(spd.run(sample_in_child, count, values, timeout=400))


def sample_in_child(llm: Any, count: int, params: dict[str, Any]) -> list[Sequence[int]]:
    from vllm import SamplingParams, TokensPrompt

    prompts = [TokensPrompt(prompt_token_ids=list(PROMPT))] * count
    results = llm.generate(prompts, SamplingParams(**params, detokenize=False), use_tqdm=False)
    return [list(result.outputs[0].token_ids) for result in results]


def acceptance(spd: EngineProcess, seed: int | None) -> float:
    """Share of the drafts that the target accepted, over 1,600 tokens at temperature 1."""
    before = spd.metrics()
    prompts = [[*PROMPT, index] for index in range(40)]
    spd.generate(prompts, {"temperature": 1.0, "max_tokens": 40, "ignore_eos": True, "seed": seed})
    after = spd.metrics()
    accepted, drafted = (after[name] - before.get(name, 0.0) for name in (ACCEPTED, DRAFTED))
    return accepted / drafted


@torch.no_grad()
def logits_after(target: Target, ids_BT: Tensor) -> Tensor:
    """Target logits [B, V] of the next token."""
    return target.model(ids_BT).logits[:, -1].float()


def masked(logits_BV: Tensor, params: Mapping[str, Any]) -> Tensor:
    """The same parameters, written down again."""
    logits_BV = logits_BV.clone()
    for token, bias in params.get("logit_bias", {}).items():
        logits_BV[:, token] += bias
    logits_BV /= params.get("temperature", 1.0)
    least = logits_BV.topk(params.get("top_k", logits_BV.shape[1]), -1).values[:, -1:]
    return logits_BV.masked_fill(logits_BV < least, float("-inf"))
