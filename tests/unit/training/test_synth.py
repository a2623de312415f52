"""On-policy data: what is written, and that an interrupted run continues. vLLM is replaced by a stub."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.models import tiny_tokenizer
from vllm_spd.training.synth import Answer, SynthOptions, synthesise, user_turn


class Stub:
    """Writes predictable texts and can fail at a given call."""

    def __init__(self, fail_at: int | None = None, finish: str = "stop") -> None:
        self.calls, self.turns, self.fail_at, self.finish = 0, 0, fail_at, finish

    def user_turns(self, openings: Sequence[str]) -> list[Answer]:
        self.calls += 1
        if self.calls == self.fail_at:
            raise KeyboardInterrupt
        self.turns += len(openings)
        numbers = range(self.turns - len(openings), self.turns)
        return [Answer(f"turn {n}", self.finish if n % 3 else "length", 2) for n in numbers]

    def answers(self, prompts: Sequence[str], temperature: float) -> list[Answer]:
        return [Answer(f"{prompt} at {temperature}", "stop", 3) for prompt in prompts]


def records(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.fixture
def options(tmp_path: Path) -> SynthOptions:
    return SynthOptions(target="unused", out=str(tmp_path / "out" / "data.jsonl"), count=20, chunk=8)


def test_prompts_and_answers_by_the_target(options: SynthOptions) -> None:
    assert synthesise(options, Stub()) == (20, 60)
    written = records(options.out)
    assert len(written) == 20
    assert {record["temperature"] for record in written} == {0.0, 0.7}
    assert all(record["response"] == f"{record['prompt']} at {record['temperature']}" for record in written)
    assert {"prompt", "response", "temperature", "finish", "n"} == set(written[0])


def test_an_interrupted_run_continues(options: SynthOptions) -> None:
    with pytest.raises(KeyboardInterrupt):
        synthesise(options, Stub(fail_at=4))
    done = len(records(options.out))
    assert 0 < done < 20
    with Path(options.out).open("a") as file:
        file.write('{"prompt": "half a li')
    assert synthesise(options, Stub()) == (20, 60)
    writer = Stub()
    assert synthesise(options, writer) == (20, 60)
    assert writer.calls == 0


@pytest.mark.parametrize(
    "lines",
    [
        ['{"prompt": "a"}', '{"turns": ["b", "more"]}', '{"messages": [{"role": "user", "content": "c"}]}'],
        ["a", "b", "c"],
    ],
)
def test_prompts_of_a_file(lines: list[str], options: SynthOptions, tmp_path: Path) -> None:
    path = tmp_path / ("prompts.jsonl" if lines[0].startswith("{") else "prompts.txt")
    path.write_text("\n".join(lines))
    synthesise(replace(options, prompts=str(path), greedy_share=1.0), Stub())
    assert [record["prompt"] for record in records(options.out)] == ["a", "b", "c"]


def test_openings_lead_the_prompts(options: SynthOptions, tmp_path: Path) -> None:
    (tmp_path / "openings.txt").write_text("Why \nHow \n")
    synthesise(replace(options, openings=str(tmp_path / "openings.txt")), Stub())
    assert all(record["prompt"].startswith(("Why turn", "How turn")) for record in records(options.out))


@pytest.mark.parametrize(("line", "word"), [("{", "not valid JSON"), ("{}", "none of prompt")])
def test_bad_prompt_lines_are_named(line: str, word: str, options: SynthOptions, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(ValueError, match=rf"p\.jsonl:2: .*{word}"):
        synthesise(replace(options, prompts=str(tmp_path / "p.jsonl")), Stub())


def test_refusals(options: SynthOptions, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="use 0 to 1"):
        synthesise(replace(options, greedy_share=2.0), Stub())
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ValueError, match="is empty"):
        synthesise(replace(options, prompts=str(tmp_path / "empty.txt")), Stub())
    with pytest.raises(RuntimeError, match="no complete user turns"):
        synthesise(options, Stub(finish="length"))


def test_the_user_turn_of_a_template(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path)
    assert user_turn(AutoTokenizer.from_pretrained(tmp_path)) == ("<|im_start|>user\n", "<|im_end|>")
