"""How a process waits while its message queue is empty.

vLLM's queues spin for a second before they sleep. Where ranks leave no core to spare, a spinning reader takes a core
from the rank that computes there, and an engine that has just answered takes a second of every core from whatever else
runs on the machine. A notification wakes a sleeping reader within some 50 microseconds, but now and then one gets lost,
and vLLM looks again only after 5 seconds. Queues that sleep early therefore look again early.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, SpinCondition

__all__ = ["SPIN_S", "spin_at_most", "spin_at_most_in_this_process"]

SPIN_S = 0.05
"""Longer than what lies between two steps of a busy engine."""
BUSY_S = 1.0
"""An engine counts as busy for so long after its last message."""
RECHECK_BUSY_MS, RECHECK_IDLE_MS = 5, 100
"""How long a sleeping reader trusts that it will be notified."""


def spin_at_most(queue: MessageQueue, seconds: float) -> None:
    """Shorten the spinning of one existing queue."""
    condition = queue._spin_condition
    condition.busy_loop_s = min(condition.busy_loop_s, seconds)
    condition.wait = MethodType(_look_again(SpinCondition.wait), condition)


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
    SpinCondition.wait = _look_again(SpinCondition.wait)


def _look_again(wait: Callable[..., None]) -> Callable[..., None]:
    @wraps(wait)
    def bounded(self: SpinCondition, timeout_ms: int | None = None) -> None:
        busy = time.monotonic() - self.last_read < BUSY_S
        most = RECHECK_BUSY_MS if busy else RECHECK_IDLE_MS
        wait(self, most if timeout_ms is None else min(timeout_ms, most))

    return bounded
