"""A real model in float32, where whole answers can be compared: the shipped drafter and prompt lookup."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.smollm2 import HEAD
from tests.engines import EngineProcess, chats_in_child
from tests.scenarios.playing import check_same, play
from tests.scenarios.scenarios import SCHEMA, Case

pytestmark = pytest.mark.slow

OPTIONS = {"dtype": "float32", "max_num_seqs": 16}
CHUNKS = {"max_num_batched_tokens": 128}
"""For SPD only: plain vLLM on CPU ends with an error when seeded requests meet prompts in chunks."""
QUESTIONS = ("What is the capital of France?", "Count from one to twenty in words.", "Write a haiku about rain.")
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    {"temperature": 1.0, "min_p": 0.1, "seed": 2, "repetition_penalty": 1.2},
    {"temperature": 0, "logprobs": 3, "presence_penalty": 0.7},
    {"temperature": 0.5, "seed": 3, "structured_outputs": {"json": SCHEMA}},
    {"temperature": 0, "stop": ["."], "include_stop_str_in_output": True},
)


@pytest.fixture(scope="module")
def plain(smollm2: Path) -> Iterator[EngineProcess]:
    with EngineProcess(model=str(smollm2), **OPTIONS) as engine:
        yield engine


@pytest.mark.parametrize("keys", [{"model": str(HEAD)}, {"drafter": "ngram"}], ids=["pdm", "ngram"])
def test_mixed_requests(plain: EngineProcess, smollm2: Path, keys: dict[str, Any]) -> None:
    prompts = plain.run(chats_in_child, QUESTIONS)
    cases = [Case(tuple(prompt), {**params, "max_tokens": 60}) for prompt in prompts for params in PARAMS]
    config = {"method": "spd", **keys}
    with EngineProcess(
        model=str(smollm2), pipeline_parallel_size=2, speculative_config=config, **OPTIONS, **CHUNKS
    ) as spd:
        for batch in (cases, cases[:1], cases[3:5]):
            check_same(plain.run(play, batch), spd.run(play, batch))
        assert spd.metrics()["vllm:spec_decode_num_accepted_tokens"] > 100
