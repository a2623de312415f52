"""Sleeping instead of spinning, on machines where ranks leave no core to spare for it.

vLLM's message queues spin for up to a second before they sleep. A spinning reader takes a core from the rank that
computes there; a notification wakes a sleeping one within some 50 microseconds.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, SpinCondition

__all__ = ["sleep_in_this_process", "sleep_while_waiting"]


def sleep_while_waiting(queue: MessageQueue) -> None:
    """Let one existing queue sleep whenever it is empty."""
    queue._spin_condition.busy_loop_s = 0


def sleep_in_this_process() -> None:
    """The same for every queue that this process creates from now on; for worker processes, which have one engine."""
    original = SpinCondition.__init__
    if getattr(original, "_spd", False):
        return

    @wraps(original)
    def init(self: SpinCondition, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.busy_loop_s = 0

    init._spd = True  # type: ignore[attr-defined]
    SpinCondition.__init__ = init
