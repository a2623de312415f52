"""From the network's logits to drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_spd.drafters.base import Rows
from vllm_spd.drafters.early_exit import EarlyExitDrafter
from vllm_spd.drafters.sampling import DraftSampler

TOKEN_IDS = torch.tensor([5, 9, 30])


def drafter() -> EarlyExitDrafter:
    """Its network reads logits out of the hidden states themselves."""
    module: Any = SimpleNamespace(
        layout=None, spec_layers=[], draft_token_ids=TOKEN_IDS, logits=lambda hidden_RH: hidden_RH[:, :3]
    )
    return EarlyExitDrafter(module, None, None)  # type: ignore[arg-type]


def row(name: str, temperature: float = 0.0) -> Rows:
    return Rows(name, [1], [], 0, 1, True, temperature)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_logit_that_is_not_a_number_spoils_its_own_draft_and_says_so(temperature: float) -> None:
    this = drafter()
    this.sampler = DraftSampler(3, seed=0, device=torch.device("cpu"))
    logits_NV = torch.tensor([[0.0, 99.0, 0.0], [0.0, float("nan"), 0.0], [99.0, 0.0, 0.0]])
    rows = [row("a", temperature), row("b", temperature), row("c")]
    assert this.tokens(rows, logits_NV, torch.arange(3)) == [9, -1, 5]


def test_only_the_newest_row_of_a_request_counts() -> None:
    logits_NV = torch.eye(3)
    assert drafter().tokens([row("a"), row("b")], logits_NV, torch.tensor([2, 0])) == [30, 5]
