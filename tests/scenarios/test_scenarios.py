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
from tests.engines import DEFAULTS, INSIDE, PLAIN, SHARED, EngineError, EnginePool, EngineProcess
from tests.heads import copied_head
from tests.models import tiny_adapter
from tests.scenarios.playing import Answer, check_same, leftovers, play, play_with_aborts
from tests.scenarios.scenarios import SCENARIOS, Case, Scenario, prompt_of
from tests.scripted import Script, scripted, write_scripts
from vllm_spd.training.target import Target

ACCEPTED, DRAFTS = "vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_draft_tokens"
CROWDED = {
    "max_num_batched_tokens": 48,
    "max_num_seqs": 16,
    "max_model_len": 256,
    "block_size": 32,
    "num_gpu_blocks_override": 17,
    "scheduling_policy": "priority",
    "env": INSIDE,
}
NOTHING = {"ledgers": 0, "requests": 0, "blocks": 0, "drafter": 0}
GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
ROOMY, TIGHT = ([s for s in SCENARIOS if s.engine == engine] for engine in ("roomy", "crowded"))


@dataclass(frozen=True)
class Stage:
    """An engine without SPD and one with it, whose drafts follow a script file unless its drafter is another."""

    plain: EngineProcess
    spd: EngineProcess
    path: Path
    adapters: tuple[str, ...]

    def check(
        self, cases: Sequence[Case], acceptance: float = 1.0, priorities: list[int] | None = None
    ) -> list[Answer]:
        """SPD's answers equal the plain ones; scripted drafts run on behind their ends."""
        expected = self.plain.run(play, cases, self.adapters)
        self.script(expected, acceptance)
        before = self.count(DRAFTS)
        check_same(expected, self.spd.run(play, cases, self.adapters, priorities))
        if max(len(answer.completions[0].token_ids) for answer in expected) > 4:
            assert self.count(DRAFTS) > before
        return expected

    def count(self, name: str) -> float:
        return self.spd.metrics().get(name, 0)

    def acceptance(self, cases: Sequence[Case]) -> float:
        """Check them, and return the share of drafts that were right."""
        before = self.count(ACCEPTED), self.count(DRAFTS)
        self.check(cases)
        return (self.count(ACCEPTED) - before[0]) / (self.count(DRAFTS) - before[1])

    def script(self, answers: Sequence[Answer], acceptance: float) -> None:
        scripts = {}
        for answer in answers:
            tokens = [*answer.completions[0].token_ids, *range(9, 13)]
            scripts[answer.prompt_token_ids] = Script(tokens, acceptance=acceptance)
        write_scripts(self.path, scripts)


@pytest.fixture(scope="module")
def stage_of(
    engines: EnginePool, tiny: Path, script: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Stage]:
    folder = tmp_path_factory.mktemp("scenarios")
    adapters = tuple(str(tiny_adapter(folder / f"adapter-{seed}", tiny, seed)) for seed in (1, 2))

    def build(stages: int, keys: dict[str, Any] | None = None, **options: Any) -> Stage:
        plain = engines.get(model=str(tiny), **PLAIN)
        config = {"pipeline_parallel_size": stages, "speculative_config": {**scripted(script), **(keys or {})}}
        return Stage(plain, engines.get(model=str(tiny), **SHARED, **config, **options), script, adapters)

    return build


@pytest.fixture(params=[2, pytest.param(4, marks=pytest.mark.slow)], ids=lambda stages: f"{stages} stages")
def roomy(request: pytest.FixtureRequest, stage_of: Callable[..., Stage]) -> Stage:
    return stage_of(request.param)


@pytest.fixture
def crowded(stage_of: Callable[..., Stage]) -> Stage:
    """Four stages, two drafts in flight, and too little of everything."""
    return stage_of(4, {"num_speculative_tokens": 2}, **CROWDED)


@pytest.fixture(scope="module", params=["pdm", pytest.param("early_exit", marks=pytest.mark.slow)])
def copying(
    request: pytest.FixtureRequest,
    stage_of: Callable[..., Stage],
    target: Target,
    tmp_path_factory: pytest.TempPathFactory,
) -> Stage:
    """A drafter that is right whenever its inputs are."""
    head = copied_head(tmp_path_factory.mktemp("heads") / "copied", target, request.param)
    keys = {"model": str(head), "drafter": request.param, "drafter_options": {}}
    return stage_of(2, keys, max_num_batched_tokens=64, max_num_seqs=16, num_gpu_blocks_override=100, env=INSIDE)


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
    assert crowded.spd.run(leftovers) == NOTHING


def test_priorities(crowded: Stage) -> None:
    crowded.check(TIGHT[0].cases, 0.6, priorities=[3, 0, 2, 5, 1, 4])


@pytest.mark.parametrize("count", [30, pytest.param(100, marks=pytest.mark.slow)])
def test_aborts_leave_nothing_behind(crowded: Stage, count: int) -> None:
    """Fails when the ledgers of ended requests are kept (tried)."""
    check_aborts(crowded, count)


def check_aborts(stage: Stage, count: int) -> None:
    neighbour = Case(prompt_of(12, 81), {**GREEDY, "max_tokens": 200})
    victims = [Case(prompt_of(5 + index, 200 + index), GREEDY) for index in range(count)]
    expected = stage.plain.run(play, [neighbour, *victims])
    stage.script(expected, 0.7)
    tokens = stage.spd.run(play_with_aborts, neighbour, victims, 0)
    assert tokens == expected[0].completions[0].token_ids
    assert stage.spd.run(leftovers) == NOTHING


@pytest.mark.parametrize("name", ["greedy", "mixed", "n", "lora"])
def test_drafters_that_read_hidden_states(copying: Stage, name: str) -> None:
    copying.check(next(one for one in SCENARIOS if one.name == name).cases)


def test_their_drafts_are_right(copying: Stage) -> None:
    """Fails when a flush, a chunk of a prompt or a preemption leaves wrong keys behind."""
    cases = [Case(prompt_of(10 + 20 * seed, seed), {**GREEDY, "max_tokens": 60}) for seed in range(8)]
    assert copying.acceptance(cases) > 0.97


def test_their_drafts_are_right_after_a_prefix_from_the_cache(copying: Stage) -> None:
    """Fails when the drafter's keys are not kept with the target's blocks."""
    case = Case(prompt_of(1000, 90), {**GREEDY, "max_tokens": 24})
    first, second = copying.acceptance([case]), copying.acceptance([case])
    assert first > 0.9 and second >= 0.95 * first


def test_their_store_is_empty_after_aborts(copying: Stage) -> None:
    """Fails when a step without rows, which ends requests all the same, does not reach the drafter (tried)."""
    check_aborts(copying, 30)


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


@pytest.mark.slow
def test_two_engines_in_one_process(roomy: Stage, tiny: Path) -> None:
    """Also what is left to the second start after the end of an engine: nothing."""
    case = Case(prompt_of(12, 91), GREEDY)
    roomy.check([case])
    options = {"model": str(tiny), **DEFAULTS, **SHARED, "pipeline_parallel_size": 2}
    first, second, again = roomy.spd.run(play_in_two_engines, case, options)
    assert first == second == again


def play_in_two_engines(llm: Any, case: Case, options: dict[str, Any]) -> tuple[Answer, ...]:
    """The same from this engine, from a second one beside it, and from this one when the second has ended."""
    from vllm import LLM

    second = LLM(**options, speculative_config={"method": "spd"})
    answers = play(llm, [case])[0], play(second, [case])[0]
    second.llm_engine.engine_core.shutdown()
    return *answers, play(llm, [case])[0]


def reset_prefix_cache(llm: Any) -> bool:
    return llm.reset_prefix_cache()
