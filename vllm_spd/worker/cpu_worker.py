"""The SPD worker on CPUs."""

from __future__ import annotations

import os
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_spd.waiting import sleep_in_this_process
from vllm_spd.worker.worker import SPDWorkerMixin

__all__ = ["SPDCPUWorker"]


class SPDCPUWorker(SPDWorkerMixin, CPUWorker):
    """`SPDWorkerMixin` over vLLM's CPU worker."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        if vllm_config.parallel_config.local_world_size > (os.cpu_count() or 1):
            sleep_in_this_process()
        super().__init__(vllm_config, *args, **kwargs)
