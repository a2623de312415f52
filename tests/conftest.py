"""Fixtures for all tests. Engines and model folders live for the session: an engine start takes 20 to 35 s."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.smollm2 import prepare
from tests.engines import EnginePool
from tests.models import tiny_llama


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return prepare()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random float32 Llama of 8 layers."""
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def engines() -> Iterator[EnginePool]:
    """`engines.get(model=…, pipeline_parallel_size=…, …)` gives a running EngineProcess, shared with other tests."""
    pool = EnginePool()
    yield pool
    pool.close()
