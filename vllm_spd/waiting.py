"""How long a process spins before it sleeps while its message queue is empty.

vLLM's queues spin for a second. Where ranks leave no core to spare, a spinning reader takes a core from the rank that
computes there; a notification wakes a sleeping one within some 50 microseconds. And an engine that has just answered
takes a second of every core from whatever else runs on the machine.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, SpinCondition

__all__ = ["SPIN_S", "spin_at_most", "spin_at_most_in_this_process"]

SPIN_S = 0.05
"""Longer than what lies between two steps of a busy engine."""


def spin_at_most(queue: MessageQueue, seconds: float) -> None:
    """Shorten the spinning of one existing queue."""
    queue._spin_condition.busy_loop_s = min(queue._spin_condition.busy_loop_s, seconds)


def spin_at_most_in_this_process(seconds: float) -> None:
    """The same for every queue that this process creates from now on; for worker processes, which have one engine."""
    original = SpinCondition.__init__
    if getattr(original, "_spd", False):
        return

    @wraps(original)
    def init(self: SpinCondition, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.busy_loop_s = min(self.busy_loop_s, seconds)

    init._spd = True  # type: ignore[attr-defined]
    SpinCondition.__init__ = init
