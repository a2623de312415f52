"""What SPD logs appears in vLLM's log."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.logger import DEFAULT_LOGGING_CONFIG

from vllm_spd.control import scheduler
from vllm_spd.worker import drafting


@pytest.mark.parametrize("module", [scheduler, drafting])
def test_loggers_lie_below_the_one_that_vllm_sets_up(module: Any) -> None:
    """Fails when they have the modules' plain names (they did, and nothing below a warning was shown)."""
    (shown,) = DEFAULT_LOGGING_CONFIG["loggers"]
    assert module.logger.name.startswith(f"{shown}.")
