"""Seeded generators: the i-th token is drawn from the i-th state, however often a position is sampled."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_spd.worker.seeds import SeededStates

DEPTH = 4


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def draw(source: torch.Generator) -> float:
    return torch.rand(1, generator=source).item()


def plain(count: int) -> list[float]:
    source = generator()
    return [draw(source) for _ in range(count)]


@given(st.lists(st.integers(0, DEPTH), max_size=30))
def test_any_flushes_leave_no_trace(returns: list[int]) -> None:
    """After each token the request goes back by some positions and draws them again.

    It never goes back further than DEPTH behind the furthest position: what lies before that is verified.
    """
    states, source, seen, position, furthest = SeededStates(DEPTH), generator(), dict[int, float](), 0, 0
    for back in [*returns, 0]:
        states.enter("a", source, position)
        value = draw(source)
        assert seen.setdefault(position, value) == value
        furthest = max(furthest, position)
        position = max(position + 1 - back, furthest - DEPTH, 0)
    assert [seen[index] for index in sorted(seen)] == plain(len(seen))


def test_only_the_last_states_are_kept() -> None:
    states, source = SeededStates(DEPTH), generator()
    for position in range(100):
        states.enter("a", source, position)
        draw(source)
    assert states.indices() == {"a": list(range(95, 100))}


def test_requests_have_states_of_their_own() -> None:
    states, one, other = SeededStates(DEPTH), generator(), generator()
    for position in range(3):
        states.enter("one", one, position)
        draw(one)
    states.enter("other", other, 0)
    assert draw(other) == plain(1)[0]


def test_a_finished_request_is_forgotten() -> None:
    states = SeededStates(DEPTH)
    states.enter("a", generator(), 0)
    states.forget("a")
    states.forget("nobody")
    assert len(states) == 0
