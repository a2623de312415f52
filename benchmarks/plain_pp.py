"""vLLM's own pipeline parallelism on CPU, to compare with."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_spd.worker.runner_v1 import PipelineGaps

__all__ = ["PlainPPWorker", "mix_in"]


class PlainPPWorker(CPUWorker):
    """vLLM's CPU worker with the receive buffers that it forgets when it runs eagerly; nothing of SPD."""

    def init_device(self) -> None:
        """Create vLLM's runner and close its gap."""
        super().init_device()
        mix_in(self.model_runner, PipelineGaps)


def mix_in(runner: Any, mixin: type) -> None:
    """Put `mixin` in front of a finished runner's class; vLLM offers no factory for runners."""
    base = type(runner)
    runner.__class__ = type(f"{mixin.__name__}{base.__name__}", (mixin, base), {})
