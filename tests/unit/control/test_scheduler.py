"""Step tables of the SPD scheduler: what it dispatches, cycle by cycle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from textwrap import dedent
from typing import Any

import pytest
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.outputs import DraftTokenIds

from tests.unit.control.conftest import MakeConfig
from tests.unit.control.pretend import NoGrammar, PretendEngine, plain, right, target
from vllm_spd.messages import StepPlan

PROMPT = [1, 2, 3]


class Script:
    """A drafter that is right except at some positions; each mention of a position counts for one draft."""

    def __init__(self, wrong: Iterable[int] = (), silent: Iterable[int] = ()) -> None:
        self.wrong, self.silent = Counter(wrong), Counter(silent)

    def __call__(self, request: str, tokens: tuple[int, ...]) -> int | None:
        position = len(tokens)
        if self.silent[position]:
            self.silent[position] -= 1
            return None
        if self.wrong[position]:
            self.wrong[position] -= 1
            return target(tokens) + 1
        return target(tokens)


def table(engine: PretendEngine, max_tokens: int) -> str:
    """One line per cycle: position dispatched (d: a draft), positions of drafts in flight, computed, emitted position.

    The state is the one after the cycle. Idle cycles at the end are left out.
    """
    request = engine.add("a", PROMPT, max_tokens)
    lines = []
    while engine.busy:
        at = request.num_tokens
        cycle = engine.cycle()
        positions = cycle.positions.get("a", range(0))
        if not positions and "a" not in engine.scheduler.requests and not cycle.emitted:
            continue
        ledger = engine.scheduler.ledgers.get("a")
        flight = range(request.num_tokens, request.num_tokens + len(ledger.in_flight if ledger else ()))
        dispatched = "" if not positions else str(positions.start) if len(positions) == 1 else f"0-{positions[-1]}"
        dispatched += "d" * ("a" in cycle.drafted and positions.start >= at)
        emitted = str(at) if "a" in cycle.emitted else ""
        lines.append(
            f"{dispatched:>4} | {' '.join(map(str, flight)):<12} | {request.num_computed_tokens:>2} | {emitted}"
        )
        assert "a" not in engine.scheduler.requests or request.num_output_placeholders == len(flight)
    assert engine.emitted["a"] == plain(PROMPT, max_tokens, 64)
    return "\n".join(line.rstrip() for line in lines)


TABLES = {
    "two stages, always right": (2, 0, Script(), 5),
    "two stages, wrong at 5": (2, 0, Script(wrong=[5]), 6),
    "four stages, always right": (4, 0, Script(), 6),
    "four stages, wrong at 4": (4, 0, Script(wrong=[4]), 6),
    "four stages, wrong at 4 and next at 5": (4, 0, Script(wrong=[4, 5, 5]), 5),
    "four stages, silent at 5": (4, 0, Script(silent=[5]), 7),
    "four stages, at most one draft": (4, 1, Script(), 5),
    "eight stages, wrong at 5": (8, 0, Script(wrong=[5]), 5),
}

EXPECTED = {
    "two stages, always right": """
         0-2 |              |  3 |
          3d |              |  4 | 3
          4d |              |  5 | 4
          5d |              |  6 | 5
          6d |              |  7 | 6
             |              |  7 | 7
    """,
    "two stages, wrong at 5": """
         0-2 |              |  3 |
          3d |              |  4 | 3
          4d |              |  5 | 4
          5d |              |  5 | 5
           5 |              |  6 |
          6d |              |  7 | 6
          7d |              |  8 | 7
             |              |  8 | 8
    """,
    "four stages, always right": """
         0-2 |              |  3 |
          3d | 3            |  4 |
          4d | 3 4          |  5 |
          5d | 4 5          |  6 | 3
          6d | 5 6          |  7 | 4
          7d | 6 7          |  8 | 5
             | 7            |  8 | 6
             |              |  8 | 7
             |              |  8 | 8
    """,
    "four stages, wrong at 4": """
         0-2 |              |  3 |
          3d | 3            |  4 |
          4d | 3 4          |  5 |
          5d | 4 5          |  6 | 3
          6d |              |  4 | 4
           4 |              |  5 |
          5d | 5            |  6 |
          6d | 5 6          |  7 |
          7d | 6 7          |  8 | 5
             | 7            |  8 | 6
             |              |  8 | 7
             |              |  8 | 8
    """,
    "four stages, wrong at 4 and next at 5": """
         0-2 |              |  3 |
          3d | 3            |  4 |
          4d | 3 4          |  5 |
          5d | 4 5          |  6 | 3
          6d |              |  4 | 4
           4 |              |  5 |
          5d | 5            |  6 |
          6d | 5 6          |  7 |
             |              |  5 | 5
           5 |              |  6 |
          6d | 6            |  7 |
             | 6            |  7 |
             |              |  7 | 6
             |              |  7 | 7
    """,
    "four stages, silent at 5": """
         0-2 |              |  3 |
          3d | 3            |  4 |
          4d | 3 4          |  5 |
             | 4            |  5 | 3
             |              |  5 | 4
             |              |  5 | 5
           5 |              |  6 |
          6d | 6            |  7 |
          7d | 6 7          |  8 |
          8d | 7 8          |  9 | 6
             | 8            |  9 | 7
             |              |  9 | 8
             |              |  9 | 9
    """,
    "four stages, at most one draft": """
         0-2 |              |  3 |
          3d | 3            |  4 |
             | 3            |  4 |
             |              |  4 | 3
          4d |              |  5 | 4
          5d | 5            |  6 |
             | 5            |  6 |
             |              |  6 | 5
          6d |              |  7 | 6
             |              |  7 |
             |              |  7 |
             |              |  7 | 7
    """,
    "eight stages, wrong at 5": """
         0-2 |              |  3 |
          3d | 3            |  4 |
          4d | 3 4          |  5 |
          5d | 3 4 5        |  6 |
          6d | 3 4 5 6      |  7 |
             | 3 4 5 6      |  7 |
             | 3 4 5 6      |  7 |
             | 4 5 6        |  7 | 3
             | 5 6          |  7 | 4
             |              |  5 | 5
           5 |              |  6 |
          6d | 6            |  7 |
             | 6            |  7 |
             | 6            |  7 |
             | 6            |  7 |
             | 6            |  7 |
             | 6            |  7 |
             |              |  7 | 6
             |              |  7 | 7
    """,
}


@pytest.mark.parametrize("name", TABLES)
def test_the_pipeline_moves_as_drawn(name: str, config: MakeConfig) -> None:
    stages, most, draft, max_tokens = TABLES[name]
    assert lines(table(PretendEngine(config(stages, most), draft), max_tokens)) == lines(EXPECTED[name])


def lines(text: str) -> list[str]:
    return [line.strip() for line in dedent(text).strip().splitlines()]


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_right_drafts_make_one_token_a_cycle(stages: int, config: MakeConfig) -> None:
    engine = PretendEngine(config(stages))
    engine.add("a", PROMPT, 40)
    emitted = [len(engine.cycle().emitted.get("a", ())) for _ in range(stages - 1 + 40)]
    assert emitted == [0] * (stages - 1) + [1] * 40


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_a_rejection_costs_one_refill(stages: int, config: MakeConfig) -> None:
    rows = []
    for wrong in ([], [20]):
        engine = PretendEngine(config(stages), Script(wrong=wrong))
        engine.add("a", PROMPT, 40)
        rows.append(engine.run())
    assert rows[1] - rows[0] == stages - 1


def test_without_drafts_it_is_plain_pipelining(config: MakeConfig) -> None:
    engine = PretendEngine(config(4), lambda request, tokens: None)
    engine.add("a", PROMPT, 5)
    engine.run()
    assert engine.emitted["a"] == plain(PROMPT, 5, 64)
    assert engine.scheduler.pipeline_stats.undrafted == 5


def test_a_flush_of_one_request_does_not_disturb_another(config: MakeConfig) -> None:
    def cycles(wrong: list[int]) -> list[dict[str, range]]:
        engine = PretendEngine(config(4), lambda request, tokens: scripts[request](request, tokens))
        scripts = {"a": Script(wrong=wrong), "b": Script()}
        engine.add("a", PROMPT, 12)
        engine.add("b", [3, 2, 1, 0], 12)
        seen = []
        while engine.busy:
            seen.append({r: p for r, p in engine.cycle().positions.items() if r == "b"})
        assert engine.emitted["b"] == plain([3, 2, 1, 0], 12, 64)
        return [positions for positions in seen if positions]

    assert cycles(wrong=[5, 9]) == cycles(wrong=[])


def test_a_decode_is_dispatched_every_cycle_beside_prompt_chunks(config: MakeConfig) -> None:
    engine = PretendEngine(config(4, max_num_batched_tokens=8))
    engine.add("a", PROMPT, 30)
    for _ in range(6):
        engine.cycle()
    engine.add("b", [1] * 30, 4)
    rows = [engine.cycle().positions for _ in range(8)]
    assert all(len(row["a"]) == 1 for row in rows)
    assert [len(row["b"]) for row in rows[:5]] == [7, 7, 7, 7, 2]
    engine.run()
    assert engine.emitted == {"a": plain(PROMPT, 30, 64), "b": plain([1] * 30, 4, 64)}


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4])
def test_the_drafter_is_not_asked_for_tokens_nobody_needs(max_tokens: int, config: MakeConfig) -> None:
    asked = []

    def draft(request: str, tokens: tuple[int, ...]) -> int:
        asked.append(len(tokens))
        return target(tokens)

    engine = PretendEngine(config(4), draft)
    engine.add("a", PROMPT, max_tokens)
    engine.run()
    assert engine.emitted["a"] == plain(PROMPT, max_tokens, 64)
    assert asked == list(range(len(PROMPT), len(PROMPT) + max_tokens - 1))


@pytest.mark.parametrize("room", [1, 2, 3, 4])
def test_the_context_s_end_is_exact(room: int, config: MakeConfig) -> None:
    engine = PretendEngine(config(4))
    prompt = [1, 2] * 31
    prompt = prompt[: 64 - room]
    prompt += [3] * (64 - room - len(prompt))
    engine.add("a", prompt, 100)
    engine.run()
    assert len(engine.emitted["a"]) == room
    assert engine.emitted["a"] == plain(prompt, 100, 64)


def test_a_stop_token_ends_a_request_whose_drafts_run_ahead(config: MakeConfig) -> None:
    answer = plain(PROMPT, 20, 64)
    stop = answer[7]
    engine = PretendEngine(config(4))
    engine.add("a", PROMPT, 20, stop_token_ids=[stop])
    engine.run()
    assert engine.emitted["a"] == answer[: answer.index(stop) + 1]
    assert engine.num_free_blocks() == engine.free_blocks


def test_an_aborted_request_leaves_nothing(config: MakeConfig) -> None:
    engine = PretendEngine(config(4))
    engine.add("a", PROMPT, 30)
    for _ in range(7):
        engine.cycle()
    assert engine.scheduler.ledgers["a"].in_flight
    engine.abort("a")
    engine.run()
    assert not engine.scheduler.ledgers and not engine.scheduler.requests
    assert engine.num_free_blocks() == engine.free_blocks


def test_rejected_drafts_do_not_enter_the_prefix_cache(config: MakeConfig) -> None:
    """The second request reuses the blocks of the first, whose positions held wrong drafts for a while.

    Fails when `_flush` does not rewind `num_computed_tokens` (tried).
    """
    engine = PretendEngine(config(4), Script(wrong=range(4, 30)))
    engine.add("a", PROMPT, 30)
    engine.run()
    prompt = [*PROMPT, *engine.emitted["a"][:26]]
    engine.add("b", prompt, 5)
    assert engine.cycle().positions["b"].start > 20
    engine.run()
    assert engine.emitted["b"] == plain(prompt, 5, 64)


def test_drafts_for_unknown_and_finished_requests_are_void(config: MakeConfig) -> None:
    engine = PretendEngine(config(2))
    engine.scheduler.update_draft_token_ids(DraftTokenIds(["nobody"], [[1]]))
    engine.add("a", PROMPT, 1)
    engine.cycle()
    engine.abort("a")
    engine.scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[1]]))
    assert not engine.scheduler.ledgers


def test_vllm_counts_one_draft_per_verified_token(config: MakeConfig) -> None:
    """Except for the last one, whose draft would have no use."""
    engine = PretendEngine(config(4), Script(wrong=[6, 11]))
    engine.add("a", PROMPT, 20)
    engine.run()
    counts = [each.spec_decoding_stats for each in engine.stats if each.spec_decoding_stats is not None]
    drafts = sum(each.num_draft_tokens for each in counts)
    accepted = sum(each.num_accepted_tokens for each in counts)
    assert (drafts, accepted) == (19, 17)


class PickyGrammar(NoGrammar):
    """Forbids the token 4, and remembers which drafts it was asked to mask behind."""

    def __init__(self) -> None:
        self.asked: list[dict[str, list[int]]] = []

    def validate_tokens(self, request: Any, tokens: list[int]) -> list[int]:
        return tokens[: tokens.index(4)] if 4 in tokens else tokens

    def grammar_bitmask(self, requests: Any, req_ids: list[str], drafts: dict[str, list[int]]) -> Any:
        import numpy as np

        self.asked.append({req_id: list(tokens) for req_id, tokens in drafts.items()})
        rows = [(index, row) for index, r in enumerate(req_ids) for row in range(1 + len(drafts.get(r, ())))]
        return np.array(rows)


def test_a_draft_that_the_grammar_forbids_is_not_dispatched(config: MakeConfig) -> None:
    engine = PretendEngine(config(4), lambda request, tokens: 4)
    engine.scheduler.structured_output_manager = PickyGrammar()
    engine.add("a", PROMPT, 6)
    assert all(not engine.cycle().drafted for _ in range(30) if engine.busy)


def test_the_mask_of_a_step_lies_behind_all_drafts_in_flight(config: MakeConfig) -> None:
    engine = PretendEngine(config(4), right)
    grammar = engine.scheduler.structured_output_manager = PickyGrammar()
    grammar.validate_tokens = lambda request, tokens: tokens  # type: ignore[method-assign]
    requests = [engine.add("a", PROMPT, 20), engine.add("b", PROMPT[::-1], 20)]
    for _ in range(6):
        engine.cycle()
    for request in requests:
        request.structured_output_request = object()  # type: ignore[assignment]
    step = engine.scheduler.schedule()
    output = engine.scheduler.get_grammar_bitmask(step)
    assert isinstance(output, GrammarOutput)
    flights = {r: list(ledger.in_flight) for r, ledger in engine.scheduler.ledgers.items()}
    assert grammar.asked == [flights] and all(len(flight) == 3 for flight in flights.values())
    assert output.grammar_bitmask.tolist() == [[0, 3], [1, 3]]
    assert step.scheduled_spec_decode_tokens == {}


def test_a_plan_travels_with_every_step(config: MakeConfig) -> None:
    engine = PretendEngine(config(2))
    engine.add("a", PROMPT, 2)
    assert StepPlan.of(engine.scheduler.schedule()).draft_req_ids == ("a",)
