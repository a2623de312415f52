"""What `vllm-spd eval-head` promises is what the engine does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.smollm2 import HEAD
from tests.engines import EngineProcess, chats_in_child
from vllm_spd.cli import main

ACCEPTED, DRAFTED = "vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_draft_tokens"
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write a short story about a lighthouse keeper.",
    "How do I boil an egg?",
    "Explain photosynthesis to a child.",
    "Give me three reasons to learn a musical instrument.",
    "Write a Python function that reverses a list.",
    "What is the difference between weather and climate?",
    "A train travels 60 miles in 90 minutes. How fast is it?",
    "Describe a busy market in the morning.",
    "Why do leaves change their colour in autumn?",
    "Write an e-mail that declines a meeting politely.",
    "What should I pack for a week in the mountains?",
)


@pytest.mark.slow
def test_acceptance_is_the_agreement_that_eval_head_measures(smollm2: Path, tmp_path: Path) -> None:
    config = {"method": "spd", "model": str(HEAD)}
    with EngineProcess(model=str(smollm2), pipeline_parallel_size=2, speculative_config=config) as engine:
        prompts = engine.run(chats_in_child, QUESTIONS)
        outputs = [engine.generate([prompt], {"temperature": 0, "max_tokens": 128})[0] for prompt in prompts]
        metrics = engine.metrics()
    data, report = tmp_path / "answers.jsonl", tmp_path / "report.json"
    records = (
        {"prompt": question, "response": output.text, "finish": output.finish_reason}
        for question, output in zip(QUESTIONS, outputs, strict=True)
    )
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert main(["eval-head", str(HEAD), "--target", str(smollm2), "--data", str(data), "--json", str(report)]) == 0
    promised = json.loads(report.read_text())["all"]["acceptance"]
    assert metrics[ACCEPTED] / metrics[DRAFTED] == pytest.approx(promised, abs=0.02)
