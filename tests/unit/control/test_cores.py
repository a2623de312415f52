"""How ranks share the cores of a machine."""

from __future__ import annotations

import pytest

from vllm_spd.control.cores import omp_threads_bind


@pytest.mark.parametrize(
    ("ranks", "cores", "bind"),
    [
        (2, [0, 1], "0|1"),
        (4, [0, 1], "0|1|0|1"),
        (2, [0, 1, 2, 3], "0,1|2,3"),
        (2, [4, 6, 9], "4|6"),
        (3, [0, 1, 2, 3], "0|1|2"),
        (3, [5], "5|5|5"),
        (1, [0, 1, 2], "0,1,2"),
    ],
)
def test_cores_are_shared_in_order(ranks: int, cores: list[int], bind: str) -> None:
    assert omp_threads_bind(ranks, cores) == bind
