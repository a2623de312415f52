"""Drafter configurations: round trip and refusals."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from vllm_spd.models.pdm_config import PDMConfig

GOOD = {"num_stages": 2, "stage_layers": [4, 4], "anchors": [0, 4, 8], "vocab_size": 100, "draft_vocab_size": 10}


def test_round_trip(tmp_path) -> None:
    config = PDMConfig(**GOOD, family="qwen3", num_layers=2, base_model="some/model")
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(again, PDMConfig)
    assert again.to_diff_dict() == config.to_diff_dict()
    assert again.layout.row_types == (2, 3)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"kind": "medusa"}, "kind is 'medusa'"),
        ({"family": "gpt2"}, "family is 'gpt2'"),
        ({"head": "none"}, "head is 'none'"),
        ({"num_layers": 0}, "needs at least 1"),
        ({"draft_vocab_size": 101}, "use 1 to 100"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "cannot share"),
        ({"anchors": [0, 9]}, "last layer"),
        ({"stage_layers": [8]}, "num_stages is 2"),
    ],
)
def test_refusals(change: dict, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        PDMConfig(**(GOOD | change))


def test_an_early_exit_drafter_may_have_no_layer() -> None:
    assert PDMConfig(**GOOD, kind="early_exit", num_layers=0).num_layers == 0
