"""SPD over Ray: Ray's executor speaks the same message queues as the multiprocessing one."""

from __future__ import annotations

from vllm.v1.executor.ray_executor_v2 import RayExecutorV2

from vllm_spd.control.executor import FirstRankDrafts

__all__ = ["SPDRayExecutor"]


class SPDRayExecutor(FirstRankDrafts, RayExecutorV2):
    """Workers are Ray actors, on one or many machines."""
