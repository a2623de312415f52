"""The SPD worker on GPUs."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from vllm_spd.worker.worker import SPDWorkerMixin

__all__ = ["SPDGPUWorker"]


class SPDGPUWorker(SPDWorkerMixin, Worker):
    """`SPDWorkerMixin` over vLLM's GPU worker."""
