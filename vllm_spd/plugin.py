"""The vLLM plugin: teaches `EngineArgs` the speculative method `spd`, and touches nothing else.

vLLM has no registry for speculative methods. A wrapper around `EngineArgs.create_engine_config` therefore turns
`{"method": "spd"}` into what vLLM does know: a `custom_class` method, a scheduler class, an executor class, a worker
class and a dictionary in `additional_config`. Processes that do not ask for SPD run vLLM's own code unchanged.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

from vllm_spd import upstream
from vllm_spd.config import METHOD, SPDConfig, SPDConfigError, admit_args, admit_config
from vllm_spd.logs import logger_of
from vllm_spd.plan import describe, split_layers, target_costs

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

__all__ = ["register"]

SCHEDULER = "vllm_spd.control.scheduler.SPDScheduler"
EXECUTORS = {
    "mp": "vllm_spd.control.executor.SPDMultiprocExecutor",
    "ray": "vllm_spd.control.ray_executor.SPDRayExecutor",
}
WORKERS = {"cpu": "vllm_spd.worker.cpu_worker.SPDCPUWorker", "gpu": "vllm_spd.worker.gpu_worker.SPDGPUWorker"}


def register() -> None:
    """Entry point `vllm.general_plugins`; runs once or more in every vLLM process."""
    from vllm.engine.arg_utils import EngineArgs

    if getattr(EngineArgs.create_engine_config, "_spd", False):
        return
    EngineArgs.create_engine_config = _accept_spd(EngineArgs.create_engine_config)
    EngineArgs.add_cli_args = staticmethod(_offer_spd(EngineArgs.add_cli_args))


def _accept_spd(create_engine_config: Callable[..., VllmConfig]) -> Callable[..., VllmConfig]:
    @wraps(create_engine_config)
    def wrapper(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
        if _method(self) != METHOD:
            return create_engine_config(self, *args, **kwargs)
        upstream.check()
        vllm_config = create_engine_config(_translate(self), *args, **kwargs)
        _place_layers(vllm_config)
        admit_config(vllm_config)
        upstream.lift_sampling_refusals()
        return vllm_config

    wrapper._spd = True  # type: ignore[attr-defined]
    return wrapper


def _offer_spd(add_cli_args: Callable[..., argparse.ArgumentParser]) -> Callable[..., argparse.ArgumentParser]:
    """Add `spd` to the values that `--spec-method` takes: vLLM derives them from a closed list."""

    @wraps(add_cli_args)
    def wrapper(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = add_cli_args(parser)
        for action in parser._actions:
            if "--spec-method" in action.option_strings and action.choices is not None:
                action.choices = [*action.choices, METHOD]
        return parser

    return wrapper


def _place_layers(vllm_config: VllmConfig) -> None:
    """Settle how many target layers each stage holds: the user's word, else the checkpoint's, else a balanced split."""
    import vllm.envs as envs

    spd = SPDConfig.from_vllm_config(vllm_config)
    stage_layers = spd.stage_layers
    if envs.VLLM_PP_LAYER_PARTITION is not None:
        given = tuple(int(count) for count in envs.VLLM_PP_LAYER_PARTITION.split(","))
        if stage_layers not in (None, given):
            raise SPDConfigError(
                f"VLLM_PP_LAYER_PARTITION says {list(given)}, but the speculative config or its checkpoint says "
                f"{list(stage_layers)}: make them equal or unset the variable."
            )
        stage_layers = given
    if stage_layers is None:
        model = vllm_config.model_config
        costs = target_costs(model.hf_text_config)
        stage_layers = split_layers(model.get_total_num_hidden_layers(), spd.num_stages, costs)
        logger_of(__name__).info("%s", describe(stage_layers, costs))
    placed = replace(spd, stage_layers=stage_layers)
    vllm_config.additional_config.update(placed.to_additional_config())


def _method(args: EngineArgs) -> str | None:
    return (args.speculative_config or {}).get("method", getattr(args, "spec_method", None))


def _speculative_keys(args: EngineArgs) -> dict[str, Any]:
    """The user's JSON object with the short flags `--spec-model` and `--spec-tokens` folded in."""
    keys = dict(args.speculative_config or {})
    for key, value in (("model", args.spec_model), ("num_speculative_tokens", args.spec_tokens)):
        if value is not None and keys.setdefault(key, value) != value:
            raise ValueError(f"{key} is given twice, by a flag and in --speculative-config: remove one.")
    return keys


def _translate(args: EngineArgs) -> EngineArgs:
    """A copy of `args` that says the same in words that vLLM knows; the user's own object stays as it is."""
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname

    admit_args(args)
    spd = SPDConfig.from_speculative_config(_speculative_keys(args), args.pipeline_parallel_size)
    args = copy.copy(args)
    args.spec_method = args.spec_model = args.spec_tokens = None
    args.speculative_config = {
        "method": "custom_class",
        "model": upstream.CUSTOM_CLASS_MODEL,
        "num_speculative_tokens": spd.num_speculative_tokens,
    }
    args.additional_config = {**(args.additional_config or {}), **spd.to_additional_config()}
    args.async_scheduling = False
    args.scheduler_cls = SCHEDULER
    # The class itself: vLLM asks it whether it supports pipeline parallelism before it resolves any name.
    args.distributed_executor_backend = resolve_obj_by_qualname(EXECUTORS[args.distributed_executor_backend or "mp"])
    if args.worker_cls == "auto":
        args.worker_cls = WORKERS["cpu" if current_platform.is_cpu() else "gpu"]
    return args
