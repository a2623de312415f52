"""SPD's settings, and the one place that admits or refuses a vLLM configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

__all__ = ["ADDITIONAL_CONFIG_KEY", "METHOD", "SPDConfig", "SPDConfigError", "admit_args", "admit_config"]

METHOD = "spd"
ADDITIONAL_CONFIG_KEY = "spd"
BUILTIN_DRAFTERS = ("early_exit", "ngram", "pdm")
DRAFTERS_WITH_CHECKPOINT = ("early_exit", "pdm")
SERVED_FAMILIES = ("llama", "qwen2", "qwen3")
DRAFT_SAMPLE_METHODS = ("greedy", "probabilistic")


class SPDConfigError(ValueError):
    """A configuration that SPD refuses; the message is one sentence that says what to do."""


@dataclass(frozen=True)
class SPDConfig:
    """The keys of `--speculative-config '{"method": "spd", …}'`, and the number of stages they apply to.

    Attributes:
        num_stages: pipeline-parallel size n; taken from vLLM, not a key of its own.
        drafter: `pdm`, `early_exit`, `ngram`, or `module:Class` of a `vllm_spd.drafters.base.Drafter` of your own.
            Default: what the checkpoint says, or `ngram` without one.
        model: folder of the drafter's checkpoint (`pdm` and `early_exit`).
        num_speculative_tokens: most drafts in flight per request, 1 … n-1. Default n-1.
        draft_sample_method: `greedy`: the drafter's best guess, accepted if the target samples the same token;
            `probabilistic` (`pdm` and `early_exit`): drawn from the drafter's distribution at the request's temperature
            and accepted by rejection sampling. Requests at temperature 0 and requests with a seed, whose text shall be
            the same as without SPD, are drafted as by `greedy` in either case.
        stage_layers: target layers of each stage, first to last. Default: the checkpoint's, or a balanced split.
        prompt_lookup_max: longest n-gram that `ngram` looks up, in tokens.
        prompt_lookup_min: shortest n-gram that `ngram` looks up, in tokens.
        drafter_options: keyword arguments for a drafter of your own.

    Raises:
        SPDConfigError: a value is out of range.
    """

    num_stages: int
    drafter: str = "ngram"
    model: str | None = None
    num_speculative_tokens: int = 0
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    stage_layers: tuple[int, ...] | None = None
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2
    drafter_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        most = self.num_stages - 1
        if self.num_speculative_tokens == 0:
            object.__setattr__(self, "num_speculative_tokens", most)
        self._check_types()
        if self.stage_layers is not None:
            object.__setattr__(self, "stage_layers", tuple(self.stage_layers))
        self._check_pipeline(most)
        self._check_drafter()

    def _check_types(self) -> None:
        """What JSON can get wrong, before anything is computed with it."""
        wanted = {
            "drafter must be a name": isinstance(self.drafter, str),
            "model must be a folder's path": isinstance(self.model, str | None),
            "stage_layers must be a list of integers": isinstance(self.stage_layers, list | tuple | None),
            "drafter_options must be an object": isinstance(self.drafter_options, Mapping),
        }
        for sentence, holds in wanted.items():
            if not holds:
                raise SPDConfigError(f"{sentence}, got {getattr(self, sentence.split()[0])!r}.")

    def _check_pipeline(self, most: int) -> None:
        if self.num_stages < 2:
            raise SPDConfigError(
                "SPD fills pipeline stages, so it needs pipeline_parallel_size of 2 or more: add `-pp 2`."
            )
        if not _is_int(self.num_speculative_tokens) or not 1 <= self.num_speculative_tokens <= most:
            raise SPDConfigError(
                f"num_speculative_tokens must be between 1 and {most} with {self.num_stages} pipeline stages, "
                f"got {self.num_speculative_tokens!r}."
            )
        if self.stage_layers is None:
            return
        if len(self.stage_layers) != self.num_stages or not all(
            _is_int(count) and count >= 0 for count in self.stage_layers
        ):
            raise SPDConfigError(
                f"stage_layers must be {self.num_stages} non-negative integers, one per pipeline stage, "
                f"got {list(self.stage_layers)}."
            )

    def _check_drafter(self) -> None:
        if self.drafter not in BUILTIN_DRAFTERS and ":" not in self.drafter:
            raise SPDConfigError(
                f"drafter must be one of {', '.join(BUILTIN_DRAFTERS)} or `module:Class`, got {self.drafter!r}."
            )
        if self.drafter in DRAFTERS_WITH_CHECKPOINT and not self.model:
            raise SPDConfigError(
                f"drafter {self.drafter!r} needs a checkpoint: set `model` to its folder, or use the drafter `ngram`."
            )
        if self.drafter == "ngram" and self.model:
            raise SPDConfigError("drafter 'ngram' has no checkpoint: remove `model`, or choose the drafter `pdm`.")
        if self.draft_sample_method not in DRAFT_SAMPLE_METHODS:
            raise SPDConfigError(
                f"draft_sample_method must be one of {', '.join(DRAFT_SAMPLE_METHODS)}, "
                f"got {self.draft_sample_method!r}."
            )
        if self.draft_sample_method == "probabilistic" and self.drafter not in DRAFTERS_WITH_CHECKPOINT:
            raise SPDConfigError(
                f"drafter {self.drafter!r} has no distribution to sample from: set draft_sample_method to `greedy`."
            )
        if not _is_int(self.prompt_lookup_min) or not _is_int(self.prompt_lookup_max):
            raise SPDConfigError("prompt_lookup_min and prompt_lookup_max must be integers.")
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise SPDConfigError(
                "prompt_lookup_min must be at least 1 and at most prompt_lookup_max, "
                f"got {self.prompt_lookup_min} and {self.prompt_lookup_max}."
            )

    @classmethod
    def from_speculative_config(cls, keys: Mapping[str, Any], num_stages: int) -> SPDConfig:
        """Build from the user's JSON object (`method` included), reading defaults from the checkpoint.

        Raises:
            SPDConfigError: unknown key, bad value or unreadable checkpoint.
        """
        settings = {key.replace("-", "_"): value for key, value in keys.items() if key != "method"}
        known = {f.name for f in fields(cls)} - {"num_stages"}
        if unknown := sorted(set(settings) - known):
            raise SPDConfigError(
                f"Unknown key {', '.join(map(repr, unknown))} in the speculative config; "
                f"the method 'spd' takes {', '.join(sorted(known))}."
            )
        if "num_speculative_tokens" in settings and not settings["num_speculative_tokens"]:
            raise SPDConfigError(
                "num_speculative_tokens must be at least 1: leave it out for one per stage but the first."
            )
        if isinstance(settings.get("model"), str) and settings["model"]:
            settings = {**_checkpoint_defaults(settings["model"], num_stages), **settings}
        config = cls(num_stages=num_stages, **settings)
        if config.drafter not in BUILTIN_DRAFTERS:
            _check_importable(config.drafter)
        return config

    @classmethod
    def from_vllm_config(cls, vllm_config: VllmConfig) -> SPDConfig:
        """Read back what the plugin stored in `additional_config`."""
        return cls(**vllm_config.additional_config[ADDITIONAL_CONFIG_KEY])

    def to_additional_config(self) -> dict[str, Any]:
        """JSON-like form that travels inside `VllmConfig.additional_config`."""
        return {ADDITIONAL_CONFIG_KEY: asdict(self)}


def admit_args(args: EngineArgs) -> None:
    """Refuse engine arguments that contradict SPD, before vLLM builds a configuration from them.

    Raises:
        SPDConfigError: the first contradiction found.
    """
    if args.pipeline_parallel_size < 2:
        raise SPDConfigError("SPD fills pipeline stages, so it needs pipeline_parallel_size of 2 or more: add `-pp 2`.")
    if args.async_scheduling:
        raise SPDConfigError("SPD schedules synchronously: remove `--async-scheduling`.")
    if args.data_parallel_size > 1:
        raise SPDConfigError("SPD runs one replica per server: remove `--data-parallel-size` and start more servers.")
    if args.distributed_executor_backend not in (None, "mp", "ray"):
        raise SPDConfigError("SPD brings its own executor: set `--distributed-executor-backend` to `mp` or `ray`.")
    if args.scheduler_cls is not None:
        raise SPDConfigError("SPD brings its own scheduler: remove `--scheduler-cls`.")
    if ADDITIONAL_CONFIG_KEY in (args.additional_config or {}):
        raise SPDConfigError(
            f"SPD keeps its settings under additional_config[{ADDITIONAL_CONFIG_KEY!r}]: rename that key."
        )


def admit_config(config: VllmConfig) -> None:
    """Refuse finished vLLM configurations that SPD cannot run without changing their output.

    Raises:
        SPDConfigError: the first obstacle found.
    """
    model = config.model_config
    obstacles = {
        "SPD speeds up text generation: pooling models are served without it.": model.runner_type == "pooling",
        "SPD needs a decoder-only model: serve encoder-decoder models without it.": model.is_encoder_decoder,
        "SPD cannot rewind recurrent state yet: serve hybrid and attention-free models without it.": (
            model.is_hybrid or model.is_attention_free
        ),
        "SPD cannot hand KV blocks over while drafts are in flight: remove `--kv-transfer-config`.": (
            config.kv_transfer_config is not None
        ),
        "SPD does not split contexts over ranks: remove the context-parallel sizes.": (
            config.parallel_config.decode_context_parallel_size > 1
            or config.parallel_config.prefill_context_parallel_size > 1
        ),
    }
    for sentence, holds in obstacles.items():
        if holds:
            raise SPDConfigError(sentence)
    _check_stage_layers(config)
    _check_checkpoint(config)


def _check_stage_layers(config: VllmConfig) -> None:
    stage_layers = SPDConfig.from_vllm_config(config).stage_layers
    num_layers = config.model_config.get_total_num_hidden_layers()
    if stage_layers is not None and sum(stage_layers) != num_layers:
        raise SPDConfigError(
            f"stage_layers {list(stage_layers)} add up to {sum(stage_layers)}, but the target has {num_layers} layers."
        )


def _check_checkpoint(config: VllmConfig) -> None:
    from vllm_spd.models.checkpoint import CheckpointError, check_checkpoint

    spd = SPDConfig.from_vllm_config(config)
    if spd.model is None:
        return
    try:
        checkpoint = check_checkpoint(spd.model, config.model_config.hf_text_config)
    except CheckpointError as error:
        raise SPDConfigError(str(error)) from error
    if checkpoint.family not in SERVED_FAMILIES:
        raise SPDConfigError(
            f"{spd.model} has layers of the family {checkpoint.family!r}, which cannot be served yet: "
            f"train a drafter of one of {', '.join(SERVED_FAMILIES)}."
        )
    if spd.stage_layers != checkpoint.layout.stage_layers:
        raise SPDConfigError(
            f"{spd.model} was trained for stages of {list(checkpoint.layout.stage_layers)} layers: "
            "remove stage_layers, or train a drafter for them."
        )


def _checkpoint_defaults(model: str, num_stages: int) -> dict[str, Any]:
    from vllm_spd.models.checkpoint import CheckpointError, load_config

    try:
        checkpoint = load_config(Path(model))
    except CheckpointError as error:
        raise SPDConfigError(str(error)) from error
    if checkpoint.num_stages != num_stages:
        raise SPDConfigError(
            f"The checkpoint {model} was trained for {checkpoint.num_stages} stages: "
            f"use `-pp {checkpoint.num_stages}` or train one for {num_stages}."
        )
    return {"drafter": checkpoint.kind, "stage_layers": checkpoint.layout.stage_layers}


def _check_importable(drafter: str) -> None:
    from vllm_spd.drafters.base import drafter_class

    try:
        drafter_class(drafter)
    except ValueError as error:
        raise SPDConfigError(str(error)) from error


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
