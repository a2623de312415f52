"""A logits processor of the user's own, which depends on the tokens so far: void drafts must not reach it."""

from __future__ import annotations

from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

__all__ = ["ForbidRepeats"]


class ForbidRepeats(AdapterLogitsProcessor):
    """With `extra_args={"forbid_repeats": True}` no token appears twice."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        return forbid if (params.extra_args or {}).get("forbid_repeats") else None


def forbid(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[output_ids] = float("-inf")
    return logits
