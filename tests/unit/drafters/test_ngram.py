"""Prompt lookup against a plain rescan, and its cost in long contexts."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_spd.config import SPDConfig
from vllm_spd.drafters.base import Rows
from vllm_spd.drafters.ngram import NgramDrafter, NgramIndex

tokens = st.lists(st.integers(0, 3), max_size=40)


def rescan(sequence: Sequence[int], shortest: int, longest: int) -> int | None:
    """The token after the latest earlier occurrence of the longest n-gram that ends the sequence."""
    for size in range(longest, shortest - 1, -1):
        for end in range(len(sequence) - 1, size - 1, -1):
            if sequence[end - size : end] == sequence[len(sequence) - size :]:
                return sequence[end]
    return None


@given(st.lists(st.one_of(st.integers(0, 3), st.integers(0, 40).map(lambda cut: -cut))), st.integers(1, 3))
def test_appending_and_cutting_agree_with_a_rescan(steps: list[int], shortest: int) -> None:
    """A negative step cuts that many tokens off the end."""
    index, sequence = NgramIndex(shortest, shortest + 2), list[int]()
    for step in steps:
        if step >= 0:
            index.append(step)
            sequence.append(step)
        else:
            sequence = sequence[: max(len(sequence) + step, 0)]
            index.cut(len(sequence))
        assert len(index) == len(sequence)
        assert index.successor() == rescan(sequence, shortest, shortest + 2)


def test_the_longest_match_wins_over_a_later_shorter_one() -> None:
    index = NgramIndex(1, 2)
    for token in (1, 2, 7, 3, 2, 8, 1, 2):
        index.append(token)
    assert index.successor() == 7


def test_the_latest_of_equal_matches_wins() -> None:
    index = NgramIndex(1, 1)
    for token in (1, 7, 1, 8, 1):
        index.append(token)
    assert index.successor() == 8


def test_cutting_beyond_the_end_does_nothing() -> None:
    index = NgramIndex(1, 2)
    index.append(1)
    index.cut(5)
    assert len(index) == 1


def seconds_per_cycle(index: NgramIndex, draw: random.Random, cycles: int) -> float:
    """A cycle as in decoding: a few wrong drafts are cut away, a token is appended and looked up. Best of 5 runs."""
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(cycles):
            length = len(index)
            for _ in range(3):
                index.append(draw.randrange(50))
            index.cut(length)
            index.append(draw.randrange(50))
            index.successor()
        best = min(best, time.perf_counter() - start)
    return best / cycles


def test_a_cycle_in_100k_tokens_costs_what_it_costs_in_1k() -> None:
    """A rescan would be a hundred times slower; caches and a busy machine get a factor of six."""
    draw = random.Random(0)
    short, long = NgramIndex(2, 4), NgramIndex(2, 4)
    for _ in range(1_000):
        short.append(draw.randrange(50))
    for _ in range(100_000):
        long.append(draw.randrange(50))
    assert seconds_per_cycle(long, draw, 200) < 6 * seconds_per_cycle(short, draw, 200) + 1e-5


def rows(prompt: Sequence[int], output: Sequence[int], start: int, req_id: str = "a") -> Rows:
    num_rows = len(prompt) + len(output) - start
    return Rows(req_id, prompt, output, start, num_rows, wants_draft=True)


@pytest.fixture
def drafter() -> NgramDrafter:
    return NgramDrafter(SPDConfig(num_stages=4, prompt_lookup_min=1, prompt_lookup_max=3))


def test_a_step_that_starts_earlier_replaces_void_drafts(drafter: NgramDrafter) -> None:
    drafter.observe([rows([1, 2, 3, 1, 2], [], 0)])
    assert drafter.propose([rows([1, 2, 3, 1, 2], [], 0)]) == [3]
    drafter.observe([rows([1, 2, 3, 1, 2], [3], 5)])
    drafter.observe([rows([1, 2, 3, 1, 2], [3, 1], 6)])
    flushed = rows([1, 2, 3, 1, 2], [2], 5)
    drafter.observe([flushed])
    assert drafter.propose([flushed]) == [rescan([1, 2, 3, 1, 2, 2], 1, 3)]


def test_requests_do_not_see_each_other(drafter: NgramDrafter) -> None:
    one, other = rows([1, 2, 1], [], 0, "one"), rows([5, 6, 7], [], 0, "other")
    drafter.observe([one, other])
    assert drafter.propose([one, other]) == [2, None]


def test_a_forgotten_request_starts_anew(drafter: NgramDrafter) -> None:
    drafter.observe([rows([1, 2, 1], [], 0)])
    drafter.forget("a")
    drafter.forget("nobody")
    fresh = rows([1, 9, 1], [], 0)
    drafter.observe([fresh])
    assert drafter.propose([fresh]) == [9]


@given(tokens, tokens, st.integers(0, 40))
def test_a_prompt_in_chunks_is_one_prompt(prompt: list[int], output: list[int], cut: int) -> None:
    drafter = NgramDrafter(SPDConfig(num_stages=2, prompt_lookup_min=1, prompt_lookup_max=3))
    cut = min(cut, len(prompt))
    drafter.observe([Rows("a", prompt, [], 0, cut, wants_draft=False)])
    whole = rows(prompt, output, cut)
    drafter.observe([whole])
    assert drafter.propose([whole]) == [rescan([*prompt, *output], 1, 3)]
