"""Every scenario gives with SPD what it gives without, with drafts that are right, mixed and wrong throughout."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from examples.server import process_group
from tests.engines import EngineError, EnginePool, EngineProcess
from tests.scenarios.playing import Answer, check_same, leftovers, play, play_with_aborts
from tests.scenarios.scenarios import SCENARIOS, Case, Scenario, prompt_of
from tests.scripted import Script, scripted, write_scripts

DRAFTS = "vllm:spec_decode_num_draft_tokens"
PROCESSOR = "tests.scenarios.processors:ForbidRepeats"
COMMON = {"dtype": "float32", "logits_processors": [PROCESSOR]}
CROWDED = {
    "max_num_batched_tokens": 48,
    "max_num_seqs": 16,
    "max_model_len": 256,
    "block_size": 32,
    "num_gpu_blocks_override": 17,
    "scheduling_policy": "priority",
    "env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},  # so that the scheduler can be looked into
}
GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
ROOMY, TIGHT = ([s for s in SCENARIOS if s.engine == engine] for engine in ("roomy", "crowded"))


@dataclass(frozen=True)
class Stage:
    """An engine without SPD and one with it, whose drafts follow a script file."""

    plain: EngineProcess
    spd: EngineProcess
    path: Path

    def check(self, cases: Sequence[Case], acceptance: float, priorities: list[int] | None = None) -> list[Answer]:
        """SPD's answers equal the plain ones; drafts run on behind their ends."""
        expected = self.plain.run(play, cases)
        self.script(expected, acceptance)
        before = self.spd.metrics().get(DRAFTS, 0)
        check_same(expected, self.spd.run(play, cases, priorities))
        if max(len(answer.completions[0].token_ids) for answer in expected) > 4:
            assert self.spd.metrics()[DRAFTS] > before
        return expected

    def script(self, answers: Sequence[Answer], acceptance: float) -> None:
        scripts = {}
        for answer in answers:
            tokens = [*answer.completions[0].token_ids, *range(9, 13)]
            scripts[answer.prompt_token_ids] = Script(tokens, acceptance=acceptance)
        write_scripts(self.path, scripts)


@pytest.fixture(scope="module")
def stage_of(engines: EnginePool, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Stage]:
    path = tmp_path_factory.mktemp("scenarios") / "script.json"

    def build(stages: int, **options: Any) -> Stage:
        plain = engines.get(model=str(tiny), **COMMON)
        config = {"pipeline_parallel_size": stages, "speculative_config": scripted(path)}
        return Stage(plain, engines.get(model=str(tiny), **COMMON, **config, **options), path)

    return build


@pytest.fixture(params=[2, pytest.param(4, marks=pytest.mark.slow)], ids=lambda stages: f"{stages} stages")
def roomy(request: pytest.FixtureRequest, stage_of: Callable[..., Stage]) -> Stage:
    return stage_of(request.param)


@pytest.fixture
def crowded(stage_of: Callable[..., Stage]) -> Stage:
    return stage_of(2, **CROWDED)


@pytest.mark.parametrize("acceptance", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("scenario", ROOMY, ids=lambda scenario: scenario.name)
def test_scenario(roomy: Stage, scenario: Scenario, acceptance: float) -> None:
    """The structured cases fail when the grammar mask ignores the drafts in flight (tried)."""
    roomy.check(scenario.cases, acceptance)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("kind", ["stop_token_ids", "stop"])
def test_stops_at_every_offset(roomy: Stage, kind: str, include: bool) -> None:
    """Eight requests that differ in where they stop: at the first to the eighth token that can be told apart."""
    prompt = prompt_of(12, 77)
    (whole,) = roomy.plain.run(play, [Case(prompt, GREEDY)])
    tokens, text = whole.completions[0].token_ids, whole.completions[0].text
    marks = [[token] for token in dict.fromkeys(tokens)] if kind == "stop_token_ids" else list(dict.fromkeys(text))
    params = [{**GREEDY, kind: mark, "include_stop_str_in_output": include} for mark in marks[:8]]
    for acceptance in (1.0, 0.6):
        answers = roomy.check([Case(prompt, one) for one in params], acceptance)
        assert {answer.completions[0].finish_reason for answer in answers} == {"stop"}


@pytest.mark.parametrize("room", range(1, 7))
def test_the_end_of_the_context(roomy: Stage, room: int) -> None:
    (answer,) = roomy.check([Case(prompt_of(1024 - room, room), {**GREEDY, "max_tokens": 30})], 0.6)
    assert len(answer.completions[0].token_ids) == room


def test_the_same_prompt_twice_then_a_reset(roomy: Stage) -> None:
    case = Case(prompt_of(200, 78), GREEDY)
    for _ in range(2):
        roomy.check([case], 0.6)
    assert roomy.spd.run(reset_prefix_cache)
    roomy.check([case], 0.6)


def test_many_turns(roomy: Stage) -> None:
    prompt = prompt_of(20, 79)
    for turn in range(3):
        (answer,) = roomy.check([Case(prompt, GREEDY)], 0.6)
        prompt = (*prompt, *answer.completions[0].token_ids, *prompt_of(7, 80 + turn))


@pytest.mark.parametrize("acceptance", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("scenario", TIGHT, ids=lambda scenario: scenario.name)
def test_crowded_scenario(crowded: Stage, scenario: Scenario, acceptance: float) -> None:
    before = crowded.spd.metrics()["vllm:num_preemptions"]
    crowded.check(scenario.cases, acceptance)
    assert crowded.spd.metrics()["vllm:num_preemptions"] > before
    assert not any(crowded.spd.run(leftovers).values())


def test_priorities(crowded: Stage) -> None:
    crowded.check(TIGHT[0].cases, 0.6, priorities=[3, 0, 2, 5, 1, 4])


def test_aborts_leave_nothing_behind(crowded: Stage) -> None:
    """Fails when the ledgers of ended requests are kept (tried)."""
    neighbour = Case(prompt_of(12, 81), {**GREEDY, "max_tokens": 200})
    victims = [Case(prompt_of(5 + index, 200 + index), GREEDY) for index in range(30)]
    expected = crowded.plain.run(play, [neighbour, *victims])
    crowded.script(expected, 0.7)
    tokens = crowded.spd.run(play_with_aborts, neighbour, victims, 0)
    assert tokens == expected[0].completions[0].token_ids
    assert crowded.spd.run(leftovers) == {"ledgers": 0, "requests": 0, "blocks": 0}


def test_a_killed_worker_ends_the_engine(tiny: Path, tmp_path: Path) -> None:
    path = write_scripts(tmp_path / "script.json", {})
    engine = EngineProcess(
        model=str(tiny), dtype="float32", pipeline_parallel_size=2, speculative_config=scripted(path)
    )
    group = engine.process.pid
    assert group is not None
    workers = [pid for pid in process_group(group) if b"Worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(workers) == 2
    engine.pipe.send((play, ([Case(prompt_of(9, seed), {**GREEDY, "max_tokens": 1000}) for seed in range(64)],)))
    time.sleep(1)
    assert not engine.pipe.poll(), "it finished before the kill"
    os.kill(workers[-1], signal.SIGKILL)
    with pytest.raises(EngineError, match=r"EngineDeadError|died"):
        engine.receive(60)
    engine.close()
    assert process_group(group) == []


def reset_prefix_cache(llm: Any) -> bool:
    return llm.reset_prefix_cache()
