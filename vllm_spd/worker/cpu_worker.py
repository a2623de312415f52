"""The SPD worker on CPUs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import GroupCoordinator, get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_spd.waiting import SPIN_S, spin_at_most_in_this_process
from vllm_spd.worker.worker import SPDWorkerMixin

__all__ = ["SPDCPUWorker", "receive_when_needed"]


class SPDCPUWorker(SPDWorkerMixin, CPUWorker):
    """`SPDWorkerMixin` over vLLM's CPU worker."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        crowded = vllm_config.parallel_config.local_world_size > (os.cpu_count() or 1)
        spin_at_most_in_this_process(0.0 if crowded else SPIN_S)
        super().__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        """Create vLLM's runner and process groups."""
        super().init_device()
        receive_when_needed(get_pp_group())


class DeferredReceive:
    """A handle whose `wait` does the receiving."""

    def __init__(self, receive: Callable[[], dict[str, Tensor]], into: dict[str, Tensor]) -> None:
        self._receive = receive
        self._into = into

    def wait(self) -> None:
        """Block until the tensors have arrived."""
        self._into.update(self._receive())


def receive_when_needed(group: GroupCoordinator) -> None:
    """Let a rank prepare its inputs while the stage before it still computes, as it does on CUDA.

    vLLM's transport on CPU receives at once and blocks. A step then waits for its predecessor first and prepares
    afterwards, in every stage.
    """
    if not group.use_cpu_custom_send_recv:
        return
    receive = group.irecv_tensor_dict

    def deferred(*args: Any, **kwargs: Any) -> tuple[dict[str, Tensor], list[DeferredReceive], list[Any]]:
        tensors: dict[str, Tensor] = {}
        return tensors, [DeferredReceive(lambda: receive(*args, **kwargs)[0], tensors)], []

    group.irecv_tensor_dict = deferred
