"""Workers whose stages take a fixed time, so that the cost of the pipeline itself can be seen. Never in the product."""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from benchmarks.plain_pp import PlainPPWorker, mix_in
from vllm_spd.worker.cpu_worker import SPDCPUWorker

__all__ = ["STAGE_SECONDS", "EmulatedPlainPPWorker", "EmulatedSPDWorker"]

STAGE_SECONDS = "stage_seconds"
"""Key of vLLM's `additional_config` that holds the time of one stage."""


class FixedTimeForward(GPUModelRunner):
    """Sleeps after the model's forward until the stage's time is over; the tiny model's own time is inside it."""

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        deadline = time.perf_counter() + self.vllm_config.additional_config[STAGE_SECONDS]
        output = super()._model_forward(*args, **kwargs)
        time.sleep(max(deadline - time.perf_counter(), 0.0))
        return output


class EmulatedSPDWorker(SPDCPUWorker):
    """SPD's CPU worker with stages of fixed time."""

    def init_device(self) -> None:
        """Create SPD's runner and fix its time."""
        super().init_device()
        mix_in(self.model_runner, FixedTimeForward)


class EmulatedPlainPPWorker(PlainPPWorker):
    """vLLM's CPU worker with stages of fixed time."""

    def init_device(self) -> None:
        """Create vLLM's runner and fix its time."""
        super().init_device()
        mix_in(self.model_runner, FixedTimeForward)
