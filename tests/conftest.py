"""Fixtures for all tests. Engines and model folders live for the session: an engine start takes 20 to 35 s."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from examples.smollm2 import prepare
from tests.engines import EnginePool
from tests.models import tiny_llama
from vllm_spd.training.target import Target


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return prepare()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random float32 Llama of 8 layers."""
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def target(tiny: Path) -> Target:
    """The same model by Hugging Face."""
    return Target.load(str(tiny), dtype=torch.float32)


@pytest.fixture(scope="session")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that the scripted drafters of shared engines read."""
    return tmp_path_factory.mktemp("scripts") / "script.json"


@pytest.fixture(scope="session")
def engines() -> Iterator[EnginePool]:
    """`engines.get(model=…, pipeline_parallel_size=…, …)` gives a running EngineProcess, shared with other tests."""
    pool = EnginePool()
    yield pool
    pool.close()
