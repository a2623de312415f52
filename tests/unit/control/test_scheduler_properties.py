"""Whatever drafts say and requests do, the text is the target's, and nothing is left behind."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.control.conftest import MakeConfig
from tests.unit.control.pretend import STOP, VOCAB, PretendEngine, plain, target

MAX_MODEL_LEN = 64
ACTIONS = ("add", "add", "abort", "reset", "nothing", "nothing", "nothing", "nothing")

seeds = st.integers(0, 2**32)
prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40)
requests = st.lists(st.tuples(prompts, st.integers(1, 25), st.integers(0, STOP)), min_size=1, max_size=5)
crowds = st.lists(
    st.tuples(st.lists(st.integers(0, VOCAB - 1), min_size=6, max_size=20), st.integers(15, 25), st.just(STOP)),
    min_size=3,
    max_size=5,
)
FLUSHES = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


class Story:
    """Random drafts, arrivals, aborts and preemptions over a few requests, and what must hold after every cycle."""

    def __init__(self, config: Any, wanted: list[tuple[list[int], int, int]], num_blocks: int, seed: int) -> None:
        self.draw = random.Random(seed)
        self.rates = (self.draw.random(), self.draw.random() * 0.3)
        self.wanted = {f"r{index}": request for index, request in enumerate(wanted)}
        self.waiting = list(self.wanted)
        self.aborted: set[str] = set()
        self.engine = PretendEngine(config, self.draft, num_blocks)
        self.limit = self.engine.scheduler.spd.num_speculative_tokens

    def draft(self, request: str, tokens: tuple[int, ...]) -> int | None:
        wrong, silent = self.rates
        if self.draw.random() < silent:
            return None
        return (target(tokens) + (self.draw.random() < wrong)) % VOCAB

    def play(self) -> None:
        for _ in range(3000):
            if not self.waiting and not self.engine.busy:
                return self.check_end()
            self.act()
            if self.engine.busy:
                self.check_positions(self.engine.cycle().positions)
                self.check()
        raise AssertionError("still busy")

    def act(self) -> None:
        action = self.draw.choice(ACTIONS)
        running = [r for r in self.engine.scheduler.requests if r not in self.engine.finished]
        if self.waiting and (action == "add" or not self.engine.busy):
            req_id = self.waiting.pop()
            prompt, max_tokens, stop = self.wanted[req_id]
            self.engine.add(req_id, prompt, max_tokens, stop_token_ids=[stop])
        elif action == "abort" and running and self.draw.random() < 0.2:
            req_id = self.draw.choice(running)
            self.engine.abort(req_id)
            self.aborted.add(req_id)
        elif action == "reset" and self.draw.random() < 0.3:
            self.engine.scheduler.reset_prefix_cache(reset_running_requests=True)

    def check_positions(self, positions: dict[str, range]) -> None:
        """Every position dispatched is the next one after what the request's workers hold."""
        for req_id, rows in positions.items():
            assert rows.stop == len(self.engine.workers.tokens[req_id]) or len(rows) > 0
            assert rows.stop <= MAX_MODEL_LEN

    def check(self) -> None:
        scheduler = self.engine.scheduler
        for req_id, request in scheduler.requests.items():
            flight = scheduler.ledgers[req_id].in_flight if req_id in scheduler.ledgers else ()
            assert request.num_output_placeholders == len(flight) <= self.limit
            assert request.num_computed_tokens <= request.num_tokens + len(flight)
            assert not request.spec_token_ids or len(request.spec_token_ids) == 1
        assert set(scheduler.ledgers) <= set(scheduler.requests)
        for req_id, emitted in self.engine.emitted.items():
            assert emitted == self.answer(req_id)[: len(emitted)]

    def check_end(self) -> None:
        scheduler = self.engine.scheduler
        assert not scheduler.ledgers and not scheduler.requests
        assert self.engine.num_free_blocks() == self.engine.free_blocks
        for req_id in set(self.wanted) - self.aborted:
            assert self.engine.emitted[req_id] == self.answer(req_id)

    def answer(self, req_id: str) -> list[int]:
        prompt, max_tokens, stop = self.wanted[req_id]
        return plain(prompt, max_tokens, MAX_MODEL_LEN, stop)


@pytest.mark.parametrize(("stages", "drafts"), [(2, 0), (4, 0), (4, 1), (4, 2), (8, 0)])
@FLUSHES
@given(wanted=requests, seed=seeds)
def test_the_text_is_the_target_s(
    stages: int, drafts: int, wanted: list[tuple[list[int], int, int]], seed: int, config: MakeConfig
) -> None:
    Story(config(stages, drafts), wanted, num_blocks=1000, seed=seed).play()


@pytest.mark.parametrize(("stages", "drafts"), [(2, 0), (4, 0), (4, 2)])
@FLUSHES
@given(wanted=crowds, seed=seeds)
def test_also_where_blocks_are_few_and_prompts_come_in_chunks(
    stages: int, drafts: int, wanted: list[tuple[list[int], int, int]], seed: int, config: MakeConfig
) -> None:
    """20 blocks of 4 tokens hold one long request or a few short ones: preemption is the rule.

    Fails when a preempted request's results in flight are delivered instead of dropped (tried).
    """
    Story(config(stages, drafts, max_num_batched_tokens=8), wanted, num_blocks=20, seed=seed).play()


@pytest.mark.parametrize("stages", [2, 4])
@FLUSHES
@given(wanted=requests, seed=seeds)
def test_also_without_a_prefix_cache(
    stages: int, wanted: list[tuple[list[int], int, int]], seed: int, config: MakeConfig
) -> None:
    Story(config(stages, enable_prefix_caching=False), wanted, num_blocks=30, seed=seed).play()


def test_few_blocks_do_force_preemption(config: MakeConfig) -> None:
    """Else the properties above would prove less than they say."""
    engine = PretendEngine(config(4, max_num_batched_tokens=8), num_blocks=20)
    requests = [engine.add(f"r{index}", [index] * 10, 25) for index in range(4)]
    engine.run()
    assert sum(request.num_preemptions for request in requests) > 0
    assert all(engine.emitted[f"r{index}"] == plain([index] * 10, 25, MAX_MODEL_LEN) for index in range(4))
