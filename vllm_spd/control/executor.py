"""The executor that brings drafts back from the first rank while later ranks still run."""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.multiproc_executor import FutureWrapper, MultiprocExecutor
from vllm.v1.outputs import DraftTokenIds

from vllm_spd.config import SPDConfig
from vllm_spd.control.cores import omp_threads_bind, spare_cores
from vllm_spd.waiting import spin_at_most

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["FirstRankDrafts", "SPDMultiprocExecutor"]

FIRST_RANK = 0


class FirstRankDrafts(MultiprocExecutor):
    """Makes the first rank answer `execute_model` with the drafts it made in that step.

    vLLM's futures drain every earlier future first. Waiting for drafts that way would wait for the last rank and
    serialise the pipeline, so the first rank's answers have a queue of their own.
    """

    def _init_executor(self) -> None:
        prepare_environment(self.vllm_config)
        self._first_rank_futures: deque[FutureWrapper] = deque()
        self._newest: Future[Any] | None = None
        super()._init_executor()
        if current_platform.is_cpu() and not spare_cores(self.local_world_size, len(os.sched_getaffinity(0))):
            for queue in self.response_mqs:
                spin_at_most(queue, 0.0)

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        """Start a step. The future holds the first rank's answer: drafts, or an empty output for an empty step."""
        future = super().collective_rpc(
            "execute_model", args=(scheduler_output,), unique_reply_rank=FIRST_RANK, non_block=True
        )
        self.futures_queue.remove(future)
        future.futures_queue = self._first_rank_futures
        self._first_rank_futures.appendleft(future)
        self._newest = future
        return future if non_block else future.result()

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """The drafts of the newest step; waits for the first rank only."""
        if self._newest is None:
            return None
        answer = self._newest.result()
        return answer if isinstance(answer, DraftTokenIds) else None

    def collective_rpc(self, method: Any, *args: Any, unique_reply_rank: int | None = None, **kwargs: Any) -> Any:
        """vLLM's RPC; answers of the first rank that are still in its queue come out first."""
        if unique_reply_rank in (None, FIRST_RANK):
            while self._first_rank_futures:
                self._first_rank_futures.pop()._wait_for_response()
        return super().collective_rpc(method, *args, unique_reply_rank=unique_reply_rank, **kwargs)


class SPDMultiprocExecutor(FirstRankDrafts):
    """Workers on this machine, or on several that vLLM's multiprocessing backend joins."""


def prepare_environment(vllm_config: VllmConfig) -> None:
    """Settings that the workers inherit, made in the engine-core process so that the user's own stays as it is.

    The V1 runner is pinned because vLLM derives the choice from the configuration, and the workers' configuration has
    no speculative method any more.
    """
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    spd = SPDConfig.from_vllm_config(vllm_config)
    if spd.stage_layers is not None:
        os.environ["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, spd.stage_layers))
    if current_platform.is_cpu():
        bind = omp_threads_bind(vllm_config.parallel_config.local_world_size, sorted(os.sched_getaffinity(0)))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", bind)
