"""How target layers are shared out over the stages."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_spd.plan import StageCosts, describe, layer_parameters, split_layers, target_costs

SMOLLM2 = SimpleNamespace(
    hidden_size=576, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536, vocab_size=49152
)


def slowest(split: tuple[int, ...], costs: StageCosts) -> int:
    return max(costs.stage(index, len(split), count) for index, count in enumerate(split))


@given(st.integers(2, 10), st.integers(2, 3), st.integers(1, 50), st.integers(0, 200), st.integers(0, 200))
def test_no_other_split_has_a_faster_slowest_stage(layers: int, stages: int, layer: int, first: int, last: int) -> None:
    layers = max(layers, stages)
    costs = StageCosts(layer, first, last)
    split = split_layers(layers, stages, costs)
    others = [s for s in product(range(1, layers + 1), repeat=stages) if sum(s) == layers]
    assert sum(split) == layers
    assert slowest(split, costs) == min(slowest(other, costs) for other in others)


def test_the_lm_head_takes_layers_from_the_last_stage() -> None:
    assert layer_parameters(SMOLLM2) == 3_538_944
    assert split_layers(30, 2, target_costs(SMOLLM2)) == (17, 13)
    assert split_layers(30, 2, target_costs(SMOLLM2, drafter_parameters=16_000_000)) == (16, 14)


def test_only_the_experts_in_use_count() -> None:
    dense = SimpleNamespace(hidden_size=64, num_attention_heads=2, intermediate_size=128, vocab_size=10)
    sparse = SimpleNamespace(**vars(dense), num_experts_per_tok=4, moe_intermediate_size=32)
    assert layer_parameters(sparse) == layer_parameters(dense)


def test_the_log_line_names_layers_and_loads() -> None:
    assert describe((3, 1), StageCosts(10, 0, 20)) == (
        "SPD: target layers per stage 3 (100%), 1 (100%) of the slowest stage's work"
    )


def test_fewer_layers_than_stages_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 3 stages"):
        split_layers(3, 4, StageCosts(1))
