"""Spinning is shortened, never prolonged, and sleep is interrupted."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

from vllm_spd.waiting import spin_at_most, spin_at_most_in_this_process


class Condition:
    """Stands for vLLM's, and notes how long it would sleep."""

    def __init__(self, busy_loop_s: float = 1, last_read: float = 0.0) -> None:
        self.busy_loop_s = busy_loop_s
        self.last_read = last_read
        self.waited: list[int | None] = []

    def wait(self, timeout_ms: int | None = None) -> None:
        self.waited.append(timeout_ms)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("__init__", "wait"):
        monkeypatch.setattr(SpinCondition, name, getattr(Condition, name))


def test_one_queue() -> None:
    this = SimpleNamespace(_spin_condition=SpinCondition())
    for wanted, spins in ((0.05, 0.05), (0.5, 0.05), (0.0, 0.0)):
        spin_at_most(this, wanted)  # type: ignore[arg-type]
        assert this._spin_condition.busy_loop_s == spins


def test_every_queue_to_come() -> None:
    spin_at_most_in_this_process(0.05)
    spin_at_most_in_this_process(0.5)
    assert SpinCondition().busy_loop_s == 0.05  # type: ignore[call-arg]
    assert SpinCondition(busy_loop_s=0).busy_loop_s == 0  # type: ignore[call-arg]


@pytest.mark.parametrize(("ago", "most"), [(0.1, 5), (60, 100)], ids=["busy", "idle"])
@pytest.mark.parametrize("shorten", [spin_at_most, lambda queue, seconds: spin_at_most_in_this_process(seconds)])
def test_a_lost_notification_costs_milliseconds(shorten: Any, ago: float, most: int) -> None:
    condition = SpinCondition(last_read=time.monotonic() - ago)  # type: ignore[call-arg]
    shorten(SimpleNamespace(_spin_condition=condition), 0.0)
    for wanted in (None, 5000, 1):
        condition.wait(wanted)
    assert condition.waited == [most, most, 1]
