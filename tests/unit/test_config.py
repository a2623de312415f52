"""Settings: what they mean, and that every refusal is one sentence."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_spd.config import SPDConfig, SPDConfigError, admit_args, admit_config


def from_keys(stages: int = 4, **keys: Any) -> SPDConfig:
    return SPDConfig.from_speculative_config({"method": "spd", **keys}, stages)


def one_sentence(message: str) -> bool:
    return message.endswith(".") and ". " not in message and "\n" not in message


def test_the_defaults_need_nothing_but_the_method() -> None:
    spd = from_keys()
    assert (spd.num_stages, spd.drafter, spd.num_speculative_tokens) == (4, "ngram", 3)
    assert spd.draft_sample_method == "greedy" and spd.stage_layers is None


def test_keys_may_be_written_with_dashes() -> None:
    assert from_keys(**{"num-speculative-tokens": 2}).num_speculative_tokens == 2


def test_settings_survive_the_way_through_vllm() -> None:
    spd = from_keys(stage_layers=[1, 2, 3, 4], drafter="tests.scripted:ScriptedDrafter", drafter_options={"path": "x"})
    config: Any = SimpleNamespace(additional_config={"other": 1, **spd.to_additional_config()})
    assert SPDConfig.from_vllm_config(config) == spd
    assert spd.stage_layers == (1, 2, 3, 4)


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        from_keys().drafter = "pdm"  # type: ignore[misc]


REFUSED = [
    ({"drafters": "ngram"}, "Unknown key 'drafters'"),
    ({"drafter": "oracle"}, "drafter must be one of"),
    ({"drafter": 5}, "drafter must be a name"),
    ({"drafter": None}, "drafter must be a name"),
    ({"drafter": "pdm"}, "needs a checkpoint"),
    ({"drafter": "early_exit"}, "needs a checkpoint"),
    ({"model": 5}, "model must be a folder's path"),
    ({"model": "/no/such/folder"}, "/no/such/folder"),
    ({"num_speculative_tokens": 0}, "num_speculative_tokens must be at least 1"),
    ({"num_speculative_tokens": None}, "num_speculative_tokens must be at least 1"),
    ({"num_speculative_tokens": False}, "num_speculative_tokens must be at least 1"),
    ({"num_speculative_tokens": 4}, "num_speculative_tokens must be between 1 and 3"),
    ({"num_speculative_tokens": -1}, "num_speculative_tokens must be between 1 and 3"),
    ({"num_speculative_tokens": "2"}, "num_speculative_tokens must be between 1 and 3"),
    ({"num_speculative_tokens": True}, "num_speculative_tokens must be between 1 and 3"),
    ({"num_speculative_tokens": 1.5}, "num_speculative_tokens must be between 1 and 3"),
    ({"draft_sample_method": "magic"}, "draft_sample_method must be one of"),
    ({"draft_sample_method": ["greedy"]}, "draft_sample_method must be one of"),
    ({"draft_sample_method": "probabilistic"}, "no distribution to sample from"),
    ({"stage_layers": [2, 2]}, "stage_layers must be 4 non-negative integers"),
    ({"stage_layers": [2, 2, 2, -1]}, "stage_layers must be 4 non-negative integers"),
    ({"stage_layers": [2, 2, 2, "2"]}, "stage_layers must be 4 non-negative integers"),
    ({"stage_layers": "2,2,2,2"}, "stage_layers must be a list"),
    ({"stage_layers": 8}, "stage_layers must be a list"),
    ({"prompt_lookup_min": 0}, "prompt_lookup_min must be at least 1"),
    ({"prompt_lookup_min": 3, "prompt_lookup_max": 2}, "at most prompt_lookup_max"),
    ({"prompt_lookup_max": "4"}, "must be integers"),
    ({"drafter_options": [1]}, "drafter_options must be an object"),
]


@pytest.mark.parametrize(("keys", "sentence"), REFUSED, ids=str)
def test_a_bad_value_is_refused_in_one_sentence(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SPDConfigError) as refusal:
        from_keys(**keys)
    assert sentence in str(refusal.value)
    assert one_sentence(str(refusal.value))


def test_one_stage_is_refused() -> None:
    with pytest.raises(SPDConfigError, match="add `-pp 2`"):
        from_keys(stages=1)


def test_a_checkpoint_for_ngram_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SPDConfigError, match="has no checkpoint"):
        SPDConfig(num_stages=2, drafter="ngram", model=str(tmp_path))


def arguments(**changes: Any) -> Any:
    good: dict[str, Any] = {
        "pipeline_parallel_size": 2,
        "async_scheduling": None,
        "data_parallel_size": 1,
        "distributed_executor_backend": None,
        "scheduler_cls": None,
        "additional_config": {},
    }
    return SimpleNamespace(**{**good, **changes})


def test_good_arguments_are_admitted() -> None:
    admit_args(arguments())
    admit_args(arguments(async_scheduling=False, distributed_executor_backend="ray", additional_config={"mine": 1}))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"pipeline_parallel_size": 1}, "add `-pp 2`"),
        ({"async_scheduling": True}, "remove `--async-scheduling`"),
        ({"data_parallel_size": 2}, "remove `--data-parallel-size`"),
        ({"distributed_executor_backend": "uni"}, "to `mp` or `ray`"),
        ({"scheduler_cls": "my.Scheduler"}, "remove `--scheduler-cls`"),
        ({"additional_config": {"spd": {}}}, "rename that key"),
    ],
    ids=str,
)
def test_a_contradicting_argument_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SPDConfigError, match=sentence) as refusal:
        admit_args(arguments(**changes))
    assert one_sentence(str(refusal.value))


def configuration(layers: int = 8, stage_layers: list[int] | None = None, **changes: Any) -> Any:
    spd = SPDConfig(num_stages=2, stage_layers=tuple(stage_layers) if stage_layers else None)
    model = {
        "runner_type": "generate",
        "is_encoder_decoder": False,
        "is_hybrid": False,
        "is_attention_free": False,
        "get_total_num_hidden_layers": lambda: layers,
    }
    parallel = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    return SimpleNamespace(
        model_config=SimpleNamespace(**{**model, **{k: v for k, v in changes.items() if k in model}}),
        parallel_config=SimpleNamespace(**{**parallel, **{k: v for k, v in changes.items() if k in parallel}}),
        kv_transfer_config=changes.get("kv_transfer_config"),
        additional_config=spd.to_additional_config(),
    )


def test_a_good_configuration_is_admitted() -> None:
    admit_config(configuration())
    admit_config(configuration(stage_layers=[5, 3]))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"runner_type": "pooling"}, "pooling models"),
        ({"is_encoder_decoder": True}, "encoder-decoder models"),
        ({"is_hybrid": True}, "hybrid and attention-free"),
        ({"is_attention_free": True}, "hybrid and attention-free"),
        ({"kv_transfer_config": object()}, "remove `--kv-transfer-config`"),
        ({"decode_context_parallel_size": 2}, "context-parallel"),
        ({"prefill_context_parallel_size": 2}, "context-parallel"),
        ({"stage_layers": [5, 4]}, "add up to 9, but the target has 8 layers"),
    ],
    ids=str,
)
def test_an_obstacle_in_the_configuration_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SPDConfigError, match=sentence) as refusal:
        admit_config(configuration(**changes))
    assert one_sentence(str(refusal.value))


@pytest.mark.parametrize(
    ("drafter", "sentence"),
    [("nowhere:Drafter", "Cannot load"), ("json:Nothing", "Cannot load"), ("json:JSONDecoder", "is no subclass")],
)
def test_a_drafter_that_cannot_be_loaded_is_refused_before_any_worker_starts(drafter: str, sentence: str) -> None:
    with pytest.raises(SPDConfigError, match=sentence):
        SPDConfig.from_speculative_config({"method": "spd", "drafter": drafter}, num_stages=2)
