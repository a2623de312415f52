"""Spinning is shortened, never prolonged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

from vllm_spd.waiting import spin_at_most, spin_at_most_in_this_process


def queue(seconds: float) -> Any:
    return SimpleNamespace(_spin_condition=SimpleNamespace(busy_loop_s=seconds))


def test_one_queue() -> None:
    this = queue(1.0)
    for wanted, spins in ((0.05, 0.05), (0.5, 0.05), (0.0, 0.0)):
        spin_at_most(this, wanted)
        assert this._spin_condition.busy_loop_s == spins


def test_every_queue_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(self: Any, busy_loop_s: float = 1) -> None:
        self.busy_loop_s = busy_loop_s

    monkeypatch.setattr(SpinCondition, "__init__", init)
    spin_at_most_in_this_process(0.05)
    spin_at_most_in_this_process(0.5)
    assert SpinCondition().busy_loop_s == 0.05  # type: ignore[call-arg]
    assert SpinCondition(busy_loop_s=0).busy_loop_s == 0  # type: ignore[call-arg]
