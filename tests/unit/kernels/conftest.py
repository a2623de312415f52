"""Runs checks of the Triton kernels under Triton's interpreter, and on a GPU where there is one.

Triton reads TRITON_INTERPRET when it is imported, and other tests of the session may have imported it. So a check is
a function of a test module, and runs in a child process that had the variable from its start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import torch

Runner = Callable[..., Any]
"""`run(check, *args)` calls `check(device, *args)` and raises what it raises."""


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Runner]:
    pool = ProcessPoolExecutor(1, get_context("spawn"), torch.set_num_threads, (1,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        pool.submit(torch.get_num_threads).result()
    yield lambda check, *args: pool.submit(check, "cpu", *args).result()
    pool.shutdown()


@pytest.fixture(params=["interpreter", *(["cuda"] if torch.cuda.is_available() else [])])
def run(request: pytest.FixtureRequest) -> Runner:
    if request.param == "interpreter":
        return request.getfixturevalue("interpreter")
    return lambda check, *args: check("cuda", *args)
