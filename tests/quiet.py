"""Plain vLLM whose idle workers leave the cores to the engine that is compared with it. In tests only."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_spd.waiting import SPIN_S, spin_at_most_in_this_process

__all__ = ["QuietWorker"]


class QuietWorker(CPUWorker):
    """vLLM's CPU worker; it spins for 50 ms instead of a second."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        spin_at_most_in_this_process(SPIN_S)
        super().__init__(*args, **kwargs)
