"""Which CPU cores which rank runs on, where vLLM's automatic binding (one NUMA node per rank) does not apply."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["omp_threads_bind", "spare_cores"]


def omp_threads_bind(num_ranks: int, cores: Sequence[int]) -> str:
    """Share `cores` evenly, in order; with more ranks than cores, ranks take turns on them.

    Args:
        num_ranks: ranks on this machine.
        cores: core ids that this process may use.

    Returns:
        The form of `VLLM_CPU_OMP_THREADS_BIND`: core lists separated by `|`, one per rank.
    """
    share = max(len(cores) // num_ranks, 1)
    lists = (cores[(rank * share) % len(cores) :][:share] for rank in range(num_ranks))
    return "|".join(",".join(map(str, ids)) for ids in lists)


def spare_cores(num_ranks: int, num_cores: int) -> bool:
    """Whether the engine core, which schedules, has a core that no rank on this machine computes on."""
    return num_cores % num_ranks > 0 and num_cores > num_ranks
