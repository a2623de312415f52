"""A tiny target and text that it wrote itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vllm_spd.training.data import Sample, read_samples
from vllm_spd.training.target import Target

PROMPTS = 48
ANSWER = 40


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from threads, which would only wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def target(tiny: Path) -> Target:
    return Target.load(str(tiny), torch.float32)


@pytest.fixture(scope="session")
def on_policy(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Greedy answers of the tiny target to short prompts, as chat JSONL."""
    ids = [target.tokenizer(f"<|im_start|>user\n{n}")["input_ids"][-4:] for n in range(1000, 1000 + PROMPTS)]
    out = target.model.generate(
        torch.tensor(ids), do_sample=False, min_new_tokens=ANSWER, max_new_tokens=ANSWER, pad_token_id=2
    )
    path = tmp_path_factory.mktemp("data") / "on-policy.jsonl"
    texts = target.tokenizer.batch_decode(out[:, len(ids[0]) :])
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="session")
def samples(target: Target, on_policy: Path) -> list[Sample]:
    return read_samples([on_policy], target.tokenizer, 64)[0]
