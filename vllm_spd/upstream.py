"""Every vLLM symbol that SPD relies on: where, why, since when; and the check that it is there.

A new vLLM version is supported by running `vllm-spd doctor` on it, mending what it names, and adding the version here.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from vllm_spd.config import SPDConfigError

__all__ = ["SUPPORTED_VERSIONS", "SYMBOLS", "Symbol", "check", "lift_sampling_refusals", "missing", "version_problem"]

SUPPORTED_VERSIONS = ("0.32",)


@dataclass(frozen=True)
class Symbol:
    """One dependency on vLLM's insides.

    Attributes:
        path: `module:attribute`, dotted below the colon.
        why: what SPD does with it.
        parameters: names of parameters that SPD passes or overrides.
        attributes: instance attributes that its class must assign or annotate (looked for in the class's source).
        since: first vLLM version known to have it in this form.
        only: where it is needed, if not everywhere: `cpu`, `ray`, `checkpoint` (drafters with weights) or `synth`.
    """

    path: str
    why: str
    parameters: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    since: str = "0.32"
    only: str = ""

    def problem(self) -> str | None:
        """What is wrong with the installed vLLM's form of the symbol; None if nothing is."""
        module, _, names = self.path.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for name in filter(None, names.split(".")):
                found = getattr(found, name)
        except (ImportError, AttributeError, NameError) as error:  # NameError: vLLM's Ray modules without Ray
            return f"{self.path} is missing ({error})"
        if self.parameters:
            lost = set(self.parameters) - set(inspect.signature(found).parameters)
            if lost:
                return f"{self.path} has lost its parameter {', '.join(sorted(lost))}"
        if self.attributes:
            source = inspect.getsource(found)
            lost = {name for name in self.attributes if name not in source}
            if lost:
                return f"{self.path} has lost its attribute {', '.join(sorted(lost))}"
        return None


_ARGS = "vllm.engine.arg_utils:EngineArgs"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_EXECUTOR = "vllm.v1.executor.multiproc_executor:MultiprocExecutor"
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"

SYMBOLS = (
    Symbol(f"{_ARGS}.create_engine_config", "translates the method `spd` into what vLLM knows"),
    Symbol(f"{_ARGS}.add_cli_args", "offers `spd` as a value of --spec-method", ("parser",)),
    Symbol(
        _ARGS,
        "carries SPD's classes into the configuration",
        attributes=(
            "additional_config",
            "async_scheduling",
            "distributed_executor_backend",
            "scheduler_cls",
            "spec_method",
            "spec_model",
            "spec_tokens",
            "speculative_config",
            "worker_cls",
        ),
    ),
    Symbol(
        "vllm.sampling_params:SamplingParams._validate_spec_decode",
        "refuses min_p and logit_bias under speculation, which SPD supports",
        ("speculative_config",),
    ),
    Symbol("vllm.v1.engine.core:EngineCore.post_step", "fetches drafts after each step when scheduling is synchronous"),
    Symbol("vllm.v1.engine.core:EngineCore.step_with_batch_queue", "keeps n steps in flight"),
    Symbol(f"{_SCHEDULER}.schedule", "takes one draft per request from spec_token_ids", ("throttle_prefills",)),
    Symbol(
        _SCHEDULER,
        "state that the SPD scheduler reads or resets",
        attributes=(
            "log_stats",
            "max_model_len",
            "num_lookahead_tokens",
            "num_spec_tokens",
            "requests",
            "spec_decode_metrics_level",
            "structured_output_manager",
        ),
    ),
    Symbol(
        f"{_SCHEDULER}.update_draft_token_ids", "replaced: a draft belongs to the ledger first", ("draft_token_ids",)
    ),
    Symbol(f"{_SCHEDULER}._update_after_schedule", "turns a draft into a decode row", ("scheduler_output",)),
    Symbol(
        f"{_SCHEDULER}._update_request_with_output",
        "verifies the oldest draft",
        ("request", "new_token_ids", "is_stale"),
    ),
    Symbol(
        f"{_SCHEDULER}._preempt_request",
        "voids drafts of a preempted request",
        ("request", "timestamp", "drop_stale_output"),
    ),
    Symbol(f"{_SCHEDULER}._handle_stopped_request", "voids drafts at the end of a turn", ("request",)),
    Symbol(f"{_SCHEDULER}._free_request", "frees the ledger", ("request", "delay_free_blocks")),
    Symbol(f"{_SCHEDULER}.get_grammar_bitmask", "masks behind the drafts in flight", ("scheduler_output",)),
    Symbol(f"{_SCHEDULER}.make_stats", "reports acceptance through vLLM's counters", ("spec_decoding_stats",)),
    Symbol(
        "vllm.v1.request:Request",
        "counters that a flush rewinds",
        attributes=(
            "drop_stale_output",
            "num_computed_tokens",
            "num_in_flight_tokens",
            "num_output_placeholders",
            "num_stale_output_tokens",
            "spec_decode_metrics",
            "spec_token_ids",
        ),
    ),
    Symbol(
        "vllm.v1.structured_output:StructuredOutputManager.validate_tokens",
        "asks the grammar about a draft",
        ("request", "spec_tokens"),
    ),
    Symbol(
        "vllm.v1.core.sched.output:GrammarOutput",
        "one bitmask row per request",
        ("structured_output_request_ids", "grammar_bitmask", "num_acceptable_drafts"),
    ),
    Symbol(
        "vllm.v1.core.sched.output:CachedRequestData",
        "carries the draft to earlier ranks",
        ("req_ids", "new_token_ids", "num_computed_tokens", "num_output_tokens"),
    ),
    Symbol("vllm.v1.outputs:DraftTokenIds", "drafts on their way to the scheduler", ("req_ids", "draft_token_ids")),
    Symbol(
        "vllm.v1.spec_decode.metrics:SpecDecodingStats.observe_draft",
        "vLLM's speculation counters",
        ("num_draft_tokens", "num_accepted_tokens"),
    ),
    Symbol(f"{_EXECUTOR}._init_executor", "sets what workers inherit"),
    Symbol(
        f"{_EXECUTOR}.collective_rpc",
        "lets the first rank answer a step",
        ("method", "args", "non_block", "unique_reply_rank"),
    ),
    Symbol(f"{_EXECUTOR}.execute_model", "answered by the first rank instead of the last", ("scheduler_output",)),
    Symbol(
        "vllm.v1.executor.multiproc_executor:FutureWrapper",
        "moved to a queue of the first rank's own",
        attributes=("futures_queue", "_wait_for_response"),
    ),
    Symbol(
        "vllm.distributed.device_communicators.shm_broadcast:SpinCondition",
        "made to sleep early, and to look again soon, where no core is spare for spinning",
        attributes=("busy_loop_s", "last_read", "timeout_ms"),
    ),
    Symbol(
        "vllm.v1.worker.gpu_worker:Worker",
        "base of the SPD workers",
        attributes=("model_runner", "use_v2_model_runner"),
    ),
    Symbol("vllm.v1.worker.gpu_worker:Worker.init_device", "constructs the runner that SPD adopts"),
    Symbol("vllm.v1.worker.gpu_worker:Worker.execute_model", "runs a stage", ("scheduler_output",)),
    Symbol("vllm.v1.worker.gpu_worker:Worker.sample_tokens", "samples on the last rank", ("grammar_output",)),
    Symbol(f"{_RUNNER}.execute_model", "a stage without layers has no residual to send", ("scheduler_output",)),
    Symbol("vllm.sequence:IntermediateTensors", "what a stage sends to the next one", attributes=("tensors",)),
    Symbol(f"{_RUNNER}._update_states", "void drafts are forgotten before it", ("scheduler_output",)),
    Symbol(f"{_RUNNER}._prepare_inputs", "stale rows are marked after it"),
    Symbol(f"{_RUNNER}._sample", "seeded generators are set before it"),
    Symbol(
        "vllm.v1.sample.sampler:Sampler",
        "the step behind its logits processing is where drawn drafts are judged",
        attributes=("topk_topp_sampler",),
    ),
    Symbol(
        "vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p",
        "the distribution that a drawn draft is judged with",
        ("logits", "k", "p"),
    ),
    Symbol(
        "vllm.v1.sample.rejection_sampler:rejection_sample",
        "judges drawn drafts",
        (
            "draft_token_ids",
            "num_draft_tokens",
            "max_spec_len",
            "cu_num_draft_tokens",
            "draft_probs",
            "target_logits",
            "bonus_token_ids",
            "sampling_metadata",
        ),
    ),
    Symbol(
        "vllm.v1.sample.metadata:SamplingMetadata",
        "tells the rejection sampler that all its rows are random",
        ("all_greedy", "all_random", "temperature", "generators"),
    ),
    Symbol("vllm.sampling_params:SamplingType.RANDOM", "requests at a temperature and without a seed"),
    Symbol("vllm.sampling_params:SamplingParams.sampling_type", "tells which drafts are drawn"),
    Symbol(f"{_RUNNER}._bookkeeping_sync", "rewinds generators by an offset that CPU generators do not have"),
    Symbol(f"{_RUNNER}._on_request_state_removed", "frees what SPD keeps per request", ("req_id",)),
    Symbol(f"{_RUNNER}.initialize_kv_cache", "receive buffers of later ranks are allocated after it"),
    Symbol(
        _RUNNER,
        "state of the V1 runner",
        attributes=("discard_request_mask", "input_batch", "intermediate_tensors", "max_num_tokens", "requests"),
    ),
    Symbol(
        "vllm.v1.worker.gpu_input_batch:InputBatch",
        "rows of a step",
        attributes=("generators", "num_tokens_no_spec", "req_id_to_index", "req_ids"),
    ),
    Symbol(
        "vllm.v1.worker.gpu_input_batch:CachedRequestState",
        "tokens of a request",
        ("output_token_ids", "num_computed_tokens", "prompt_token_ids", "sampling_params"),
    ),
    Symbol("vllm.config:VllmConfig", "carries SPD's settings in additional_config"),
    Symbol("vllm.config:set_current_vllm_config", "builds the drafter without quantisation", only="checkpoint"),
    Symbol("vllm.logger:init_logger", "logs as vLLM does"),
    Symbol("vllm.platforms:current_platform.is_cpu", "tells which worker to use"),
    Symbol("vllm.utils.import_utils:resolve_obj_by_qualname", "loads the executor class", ("qualname",)),
    Symbol(
        "vllm.v1.core.sched.output:SchedulerOutput",
        "one step; SPD's plan rides on it",
        (
            "finished_req_ids",
            "num_scheduled_tokens",
            "preempted_req_ids",
            "scheduled_cached_reqs",
            "scheduled_spec_decode_tokens",
            "total_num_scheduled_tokens",
        ),
    ),
    Symbol("vllm.v1.metrics.stats:SchedulerStats", "what the scheduler reports"),
    Symbol("vllm.v1.outputs:ModelRunnerOutput", "a step's result"),
    Symbol("vllm.v1.outputs:SamplerOutput", "sampled tokens"),
    Symbol("vllm.v1.engine:EngineCoreOutputs", "what the scheduler delivers"),
    Symbol("vllm.distributed.parallel_state:get_pp_group", "tells first and last rank"),
    Symbol(
        "vllm.distributed.parallel_state:GroupCoordinator",
        "its blocking receive is put off until the step's inputs are prepared",
        attributes=("irecv_tensor_dict", "use_cpu_custom_send_recv"),
        only="cpu",
    ),
    Symbol(
        "vllm.v1.worker.gpu_worker:AsyncIntermediateTensors",
        "waits for what the stage before sends when it is first looked at",
        ("tensors", "comm_handles", "comm_postprocess"),
        only="cpu",
    ),
    Symbol("vllm.v1.worker.cpu_worker:CPUWorker", "base of the SPD worker on CPUs", only="cpu"),
    Symbol("vllm.v1.executor.ray_executor_v2:RayExecutorV2", "base of SPD's executor over Ray", only="ray"),
    Symbol(
        "vllm.distributed.device_communicators.shm_broadcast:MessageQueue",
        "made to sleep where no core is spare for spinning",
        attributes=("_spin_condition",),
    ),
    Symbol(
        "vllm.forward_context:set_forward_context",
        "runs the drafter's attention outside the target's forward pass",
        ("attn_metadata", "vllm_config", "num_tokens", "slot_mapping"),
    ),
    Symbol(
        "vllm.v1.attention.backend:CommonAttentionMetadata",
        "describes the drafter's rows",
        (
            "block_table_tensor",
            "causal",
            "max_query_len",
            "max_seq_len",
            "num_actual_tokens",
            "num_reqs",
            "positions",
            "query_start_loc",
            "query_start_loc_cpu",
            "seq_lens",
            "slot_mapping",
        ),
    ),
    *(
        Symbol(f"vllm.model_executor.{path}", why, only="checkpoint")
        for path, why in (
            ("layers.vocab_parallel_embedding:VocabParallelEmbedding", "the target's embedding: anchor 0, tied heads"),
            ("layers.vocab_parallel_embedding:ParallelLMHead", "is no embedding, though it is a subclass"),
            ("layers.layernorm:RMSNorm", "the drafter's final norm"),
            ("layers.linear:ReplicatedLinear", "the drafter's projections and head"),
            ("model_loader.utils:process_weights_after_loading", "packs the drafter's weights as the target's"),
            ("model_loader.weight_utils:default_weight_loader", "loads weights that no layer shards"),
            ("models.llama:LlamaDecoderLayer", "layer of drafters of this family"),
            ("models.qwen2:Qwen2DecoderLayer", "layer of drafters of this family"),
            ("models.qwen3:Qwen3DecoderLayer", "layer of drafters of this family"),
        )
    ),
    Symbol("vllm:LLM.generate", "writes the text that a drafter is trained on", only="synth"),
    Symbol("vllm:SamplingParams", "writes the text that a drafter is trained on", only="synth"),
)


def version_problem(version: str) -> str | None:
    """One sentence if SPD is not tested with this vLLM version; None if it is."""
    if any(version == supported or version.startswith(f"{supported}.") for supported in SUPPORTED_VERSIONS):
        return None
    return f"SPD works with vLLM {', '.join(SUPPORTED_VERSIONS)}, and this is {version}: install a version that works."


def missing(symbols: Iterable[Symbol] = SYMBOLS) -> list[str]:
    """Problems of all symbols, one sentence part each."""
    return [problem for symbol in symbols if (problem := symbol.problem()) is not None]


def check() -> None:
    """Refuse to run on a vLLM that SPD does not fit. Called only when SPD is chosen; skips what it may not need.

    Raises:
        SPDConfigError: unsupported version, or a symbol that is missing or has changed.
    """
    import vllm

    if problem := version_problem(vllm.__version__):
        raise SPDConfigError(problem)
    if problems := missing(symbol for symbol in SYMBOLS if not symbol.only):
        raise SPDConfigError(f"This vLLM does not fit SPD: {'; '.join(problems)}.")


def lift_sampling_refusals() -> None:
    """Allow min_p and logit_bias with SPD: drafts are verified by vLLM's ordinary sampling, which honours both.

    vLLM refuses them per request as soon as any speculative method is configured. Requests to engines without SPD
    keep vLLM's check.
    """
    from vllm.sampling_params import SamplingParams

    original = SamplingParams._validate_spec_decode
    if getattr(original, "_spd", False):
        return

    @wraps(original)
    def validate(self: SamplingParams, speculative_config: Any) -> None:
        if not _is_spd(speculative_config):
            original(self, speculative_config)

    validate._spd = True  # type: ignore[attr-defined]
    SamplingParams._validate_spec_decode = validate


def _is_spd(speculative_config: Any) -> bool:
    return getattr(speculative_config, "model", None) == CUSTOM_CLASS_MODEL


CUSTOM_CLASS_MODEL = "vllm_spd.drafters"
"""Stands where vLLM's `custom_class` method names a proposer; SPD recognises its own configuration by it."""
