"""One configuration per number of stages: making one takes a second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.control.pretend import vllm_config

MakeConfig = Callable[..., Any]


@pytest.fixture(scope="session")
def config(tiny: Path) -> MakeConfig:
    """`config(stages, drafts, …)`: a vLLM configuration as the plugin makes it."""

    def make(stages: int, drafts: int = 0, **options: Any) -> Any:
        defaults = {"max_model_len": 64, "kv_cache_memory_bytes": 1 << 20, "max_num_batched_tokens": 64}
        return vllm_config(str(tiny), stages, drafts, **{**defaults, **options})

    return make
