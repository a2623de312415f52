"""The hook into `EngineArgs`: what it changes for SPD, and that it changes nothing for anybody else."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from safetensors.torch import save_file
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_spd.config import SPDConfig, SPDConfigError
from vllm_spd.control.executor import SPDMultiprocExecutor, prepare_environment
from vllm_spd.control.scheduler import SPDScheduler
from vllm_spd.models.checkpoint import expected_shapes, write_checkpoint
from vllm_spd.models.pdm_config import PDMConfig
from vllm_spd.plugin import register
from vllm_spd.upstream import SYMBOLS

SPD = {"method": "spd"}
CHANGED = next(symbol for symbol in SYMBOLS if symbol.path.endswith(":EngineArgs")).attributes


@pytest.fixture(autouse=True)
def registered() -> None:
    register()


@pytest.fixture
def environment() -> Iterator[None]:
    """Undo what `prepare_environment` sets for workers: later tests start engines from this process."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def arguments(model: Path, **changes: Any) -> EngineArgs:
    return EngineArgs(model=str(model), enforce_eager=True, max_model_len=128, kv_cache_memory_bytes=1 << 20, **changes)


def spd_config(target: Path, stages: int = 2, **keys: Any) -> VllmConfig:
    args = arguments(target, pipeline_parallel_size=stages, speculative_config={**SPD, **keys})
    return args.create_engine_config()


def parsed(*flags: str) -> EngineArgs:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    return EngineArgs.from_cli_args(parser.parse_args(list(flags)))


def test_registering_twice_changes_nothing() -> None:
    before = EngineArgs.create_engine_config, EngineArgs.add_cli_args
    register()
    assert (EngineArgs.create_engine_config, EngineArgs.add_cli_args) == before


def test_spd_becomes_what_vllm_knows(tiny: Path) -> None:
    config = spd_config(tiny, 4, num_speculative_tokens=2)
    assert config.speculative_config is not None and config.speculative_config.method == "custom_class"
    assert config.speculative_config.num_speculative_tokens == 2
    assert config.scheduler_config.get_scheduler_cls() is SPDScheduler
    assert config.scheduler_config.async_scheduling is False
    assert config.parallel_config.distributed_executor_backend is SPDMultiprocExecutor
    assert config.parallel_config.worker_cls == "vllm_spd.worker.cpu_worker.SPDCPUWorker"
    assert SPDConfig.from_vllm_config(config) == SPDConfig(
        num_stages=4, num_speculative_tokens=2, stage_layers=(2, 2, 2, 2)
    )
    assert config.max_concurrent_batches == 4


def test_the_user_s_own_arguments_stay_as_they_are(tiny: Path) -> None:
    keys = {**SPD, "num_speculative_tokens": 1}
    args = arguments(tiny, pipeline_parallel_size=2, speculative_config=keys, additional_config={"mine": 1})
    before = copy.deepcopy({name: getattr(args, name) for name in CHANGED})
    config = args.create_engine_config()
    assert {name: getattr(args, name) for name in CHANGED} == before
    assert keys == {**SPD, "num_speculative_tokens": 1}
    assert config.additional_config["mine"] == 1


def test_a_worker_class_of_one_s_own_is_kept(tiny: Path) -> None:
    args = arguments(tiny, pipeline_parallel_size=2, speculative_config=SPD, worker_cls="my.Worker")
    assert args.create_engine_config().parallel_config.worker_cls == "my.Worker"


def test_without_spd_nothing_changes(tiny: Path) -> None:
    args = arguments(tiny, pipeline_parallel_size=2)
    original = EngineArgs.create_engine_config.__wrapped__  # type: ignore[attr-defined]
    with_plugin, without = args.create_engine_config(), original(args)
    for config in (with_plugin, without):
        assert config.speculative_config is None and "spd" not in config.additional_config
    assert with_plugin.scheduler_config == without.scheduler_config
    assert with_plugin.parallel_config.distributed_executor_backend == "mp"
    assert with_plugin.parallel_config.worker_cls == without.parallel_config.worker_cls


def test_an_untested_version_only_matters_with_spd(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "9.9.9")
    monkeypatch.setattr("vllm_spd.upstream.missing", lambda symbols: ["everything is missing"])
    assert arguments(tiny).create_engine_config().speculative_config is None
    with pytest.raises(SPDConfigError, match=r"works with vLLM 0\.32"):
        spd_config(tiny)


def test_another_speculative_method_is_vllm_s_business(tiny: Path) -> None:
    args = arguments(tiny, speculative_config={"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3})
    config = args.create_engine_config()
    assert config.speculative_config is not None and config.speculative_config.method == "ngram"
    assert "spd" not in config.additional_config


def test_the_command_line_takes_json(tiny: Path) -> None:
    config = parsed("--model", str(tiny), "-pp", "2", "--speculative-config", json.dumps(SPD)).create_engine_config()
    assert SPDConfig.from_vllm_config(config).drafter == "ngram"


def test_the_command_line_takes_short_flags(tiny: Path) -> None:
    config = parsed(
        "--model", str(tiny), "-pp", "4", "--spec-method", "spd", "--spec-tokens", "2"
    ).create_engine_config()
    assert SPDConfig.from_vllm_config(config).num_speculative_tokens == 2


def test_a_short_flag_names_the_checkpoint(tiny: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    args = parsed("--model", str(tiny), "-pp", "2", "--spec-method", "spd", "--spec-model", str(missing))
    with pytest.raises(SPDConfigError, match=str(missing)):
        args.create_engine_config()


def test_a_flag_that_contradicts_the_json_is_refused(tiny: Path) -> None:
    args = parsed(
        "--model", str(tiny), "-pp", "4", "--spec-tokens", "2", "--speculative-config",
        json.dumps({**SPD, "num_speculative_tokens": 3}),
    )  # fmt: skip
    with pytest.raises(ValueError, match="given twice"):
        args.create_engine_config()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"pipeline_parallel_size": 1}, "add `-pp 2`"),
        ({"async_scheduling": True}, "remove `--async-scheduling`"),
        ({"speculative_config": {**SPD, "temperature": 1}}, "Unknown key 'temperature'"),
        ({"speculative_config": {**SPD, "stage_layers": [4, 5]}}, "the target has 8 layers"),
    ],
    ids=str,
)
def test_a_refusal_comes_before_any_process_starts(tiny: Path, changes: dict[str, Any], sentence: str) -> None:
    args = arguments(tiny, **{"pipeline_parallel_size": 2, "speculative_config": SPD, **changes})
    with pytest.raises(SPDConfigError, match=sentence):
        args.create_engine_config()


def head(folder: Path, damage: str = "") -> Path:
    """A drafter's folder for the tiny target: sound, or with one thing wrong."""
    sizes = {"hidden_size": 64, "vocab_size": 512, "intermediate_size": 128, "num_attention_heads": 2}
    stages = [3, 4] if damage == "layers" else [5, 3]
    config = PDMConfig(
        num_stages=2,
        stage_layers=stages,
        anchors=[0, stages[0]],
        head="tied" if damage == "head" else "own",
        family="qwen3_5" if damage == "family" else "llama",
        num_layers=1,
        draft_vocab_size=10,
        num_key_value_heads=2,
        head_dim=32,
        **{**sizes, **({damage: 96} if damage in sizes else {})},
    )
    tensors = {name: torch.zeros(shape) for name, shape in expected_shapes(config).items()}
    tensors["draft_token_ids"] = torch.arange(10)
    write_checkpoint(folder, config, tensors)
    weights = folder / "model.safetensors"
    if damage == "bytes":
        weights.write_bytes(weights.read_bytes()[:-100])
    if damage == "tensor":
        save_file({name: tensor for name, tensor in tensors.items() if "mlp" not in name}, weights)
    return folder


def test_a_sound_checkpoint_is_admitted(tiny: Path, tmp_path: Path) -> None:
    spd = SPDConfig.from_vllm_config(spd_config(tiny, model=str(head(tmp_path))))
    assert (spd.drafter, spd.stage_layers) == ("pdm", (5, 3))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        ("bytes", "is damaged"),
        ("tensor", "lacks the tensor"),
        ("hidden_size", "hidden_size 96, and this one has 64"),
        ("vocab_size", "vocab_size 96, and this one has 512"),
        ("layers", "a target of 7 layers, and this one has 8"),
        ("head", "`--head own`"),
        ("family", "cannot be served yet"),
    ],
)
def test_a_checkpoint_that_is_damaged_or_of_another_target_is_refused(
    tiny: Path, tmp_path: Path, damage: str, sentence: str
) -> None:
    with pytest.raises(SPDConfigError, match=sentence):
        spd_config(tiny, model=str(head(tmp_path, damage)), stage_layers=[5, 3])


def test_other_stages_than_the_checkpoint_s_are_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(SPDConfigError, match="remove stage_layers"):
        spd_config(tiny, model=str(head(tmp_path)), stage_layers=[4, 4])


def test_the_front_end_s_environment_stays_as_it_is(tiny: Path) -> None:
    before = dict(os.environ)
    spd_config(tiny)
    assert dict(os.environ) == before


@pytest.mark.usefixtures("environment")
def test_workers_use_the_v1_runner_even_where_triton_works(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's configuration has no speculative method, so vLLM would choose V2 for it on a GPU.

    Fails when `prepare_environment` does not pin the choice (tried).
    """
    for name in ("VLLM_USE_V2_MODEL_RUNNER", "VLLM_PP_LAYER_PARTITION", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.delenv(name, raising=False)
    config = spd_config(tiny, stage_layers=[5, 3])
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    assert not config.use_v2_model_runner
    prepare_environment(config)
    config.speculative_config = None
    assert not config.use_v2_model_runner
    assert os.environ["VLLM_PP_LAYER_PARTITION"] == "5,3"
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"].count("|") == 1


@pytest.mark.usefixtures("environment")
def test_a_thread_binding_of_the_user_s_own_is_kept(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|0")
    prepare_environment(spd_config(tiny))
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0|0"
