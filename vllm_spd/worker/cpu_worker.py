"""The SPD worker on CPUs."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_spd.worker.worker import SPDWorkerMixin

__all__ = ["SPDCPUWorker"]


class SPDCPUWorker(SPDWorkerMixin, CPUWorker):
    """`SPDWorkerMixin` over vLLM's CPU worker."""
