"""SPD's additions to vLLM's V1 model runner. The only file that knows V1's internals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from vllm.distributed.parallel_state import get_pp_group
from vllm.forward_context import set_forward_context
from vllm.sequence import IntermediateTensors
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_spd.config import SPDConfig
from vllm_spd.drafters.hidden import RowBatch
from vllm_spd.worker.seeds import SeededStates

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    from vllm_spd.worker.verify import DraftVerifier

__all__ = ["DraftAttention", "PipelineGaps", "SPDModelRunner", "adopt"]


def adopt(runner: GPUModelRunner, spd: SPDConfig) -> None:
    """Give a runner that vLLM has just constructed SPD's behaviour.

    vLLM's worker constructs its runner in the middle of `init_device` and offers no factory, so the class is changed
    on the finished object. The new class only overrides methods.
    """
    base = type(runner)
    runner.__class__ = type(f"SPD{base.__name__}", (SPDModelRunner, base), {})
    cast(SPDModelRunner, runner).init_spd(spd)


class PipelineGaps(GPUModelRunner):
    """What plain vLLM lacks to run pipeline stages eagerly on CPU, and a first stage without layers anywhere."""

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Allocate the receive buffers of later ranks, which vLLM leaves to a dummy run that eager CPU mode skips."""
        super().initialize_kv_cache(*args, **kwargs)
        if getattr(self, "intermediate_tensors", None) is None and not get_pp_group().is_first_rank:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """Do not send the residual of a stage without layers: it is None. The next stage's buffer for it stays zero."""
        output = super().execute_model(*args, **kwargs)
        if isinstance(output, IntermediateTensors):
            output.tensors = {name: tensor for name, tensor in output.tensors.items() if tensor is not None}
        return output


class SPDModelRunner(PipelineGaps):
    """Plain decoding that survives flushes.

    Earlier ranks are told every token they run, drafts included, and must forget the void ones. The last rank knows
    what it sampled, so it recognises a stale row by itself: the row's input token is not the token sampled for that
    position. Such a row is computed, because it is already on its way, but nothing of it is kept.
    """

    def init_spd(self, spd: SPDConfig) -> None:
        """Stand-in for a constructor; see `adopt`."""
        self.spd = spd
        self.verifier: DraftVerifier | None = None
        self._seeded = SeededStates(depth=spd.num_stages + 1)

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        self._stale = self._stale_rows(scheduler_output) if get_pp_group().is_last_rank else set()
        if not get_pp_group().is_last_rank:
            self._forget_void_drafts(scheduler_output)
        return super()._update_states(scheduler_output)

    def _forget_void_drafts(self, scheduler_output: SchedulerOutput) -> None:
        """Cut each request back to what lies before this step; vLLM's earlier ranks only ever append."""
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            state = self.requests[req_id]
            num_prompt = state.num_prompt_tokens
            del state.output_token_ids[max(num_computed - num_prompt, 0) :]
            index = self.input_batch.req_id_to_index.get(req_id)
            if index is not None:
                num_kept = max(num_computed, num_prompt)
                self.input_batch.num_tokens_no_spec[index] = min(self.input_batch.num_tokens_no_spec[index], num_kept)

    def _stale_rows(self, scheduler_output: SchedulerOutput) -> set[str]:
        """Requests whose row in this step starts from a token that the target did not choose."""
        cached = scheduler_output.scheduled_cached_reqs
        rows = zip(cached.req_ids, cached.num_computed_tokens, cached.new_token_ids, strict=True)
        return {r for r, position, tokens in rows if _is_stale(self.requests[r], position, tokens)}

    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """Mark stale rows as rows that vLLM shall not deliver, like those of an unfinished prefill."""
        result = super()._prepare_inputs(*args, **kwargs)
        if self._stale:
            for req_id in self._stale:
                self.discard_request_mask.np[self.input_batch.req_id_to_index[req_id]] = True
            self.discard_request_mask.copy_to_gpu(self.input_batch.num_reqs)
        return result

    def _sample(self, *args: Any, **kwargs: Any) -> SamplerOutput:
        """Set every seeded generator to the state that belongs to the position at hand.

        Rows that are not delivered draw too, so their generators are put back.
        """
        discarded, undelivered = self.discard_request_mask.np, []
        for index, generator in self.input_batch.generators.items():
            req_id = self.input_batch.req_ids[index]
            if discarded[index]:
                undelivered.append((generator, generator.get_state()))
            else:
                self._seeded.enter(req_id, generator, len(self.requests[req_id].output_token_ids))
        output = self._sample_with_drafts(*args, **kwargs)
        for generator, state in undelivered:
            generator.set_state(state)
        return output

    def _sample_with_drafts(self, *args: Any, **kwargs: Any) -> SamplerOutput:
        """vLLM's sampling; rows whose successor was drawn by the drafter are judged with it."""
        if self.verifier is None:
            return super()._sample(*args, **kwargs)
        self.verifier.prepare()
        try:
            return super()._sample(*args, **kwargs)
        finally:
            self.verifier.finish()

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        """Hide the generators from vLLM's rewinding of undelivered rows: `_sample` has set them by position."""
        generators = self.input_batch.generators
        self.input_batch.generators = {}
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            self.input_batch.generators = generators

    def _on_request_state_removed(self, req_id: str, req_state: CachedRequestState | None) -> None:
        super()._on_request_state_removed(req_id, req_state)
        self._seeded.forget(req_id)


def _is_stale(state: CachedRequestState, position: int, new_token_ids: list[int]) -> bool:
    index = position - state.num_prompt_tokens
    if index < 0 or len(new_token_ids) != 1:
        return False
    known = state.output_token_ids
    return index >= len(known) or known[index] != new_token_ids[0]


class DraftAttention:
    """Runs the drafter's attention layers over the KV cache and block tables that vLLM keeps for the target."""

    def __init__(self, runner: GPUModelRunner, layer_names: Sequence[str]) -> None:
        """
        Args:
            runner: of the first rank; its KV cache need not exist yet.
            layer_names: the drafter's attention layers; none for a drafter without layers.
        """
        self._runner = runner
        self._layer_names = list(layer_names)

    @cached_property
    def _group_id(self) -> int:
        groups = self._runner.kv_cache_config.kv_cache_groups
        return next(i for i, group in enumerate(groups) if self._layer_names[0] in group.layer_names)

    @cached_property
    def _builder(self) -> Any:
        groups = self._runner.attn_groups[self._group_id]
        return next(group for group in groups if self._layer_names[0] in group.layer_names).get_metadata_builder()

    @property
    def block_size(self) -> int:
        """Tokens in a KV block."""
        return self._blocks.block_size

    @property
    def block_table(self) -> torch.Tensor:
        """Block table of the current step's batch, one row per request, on the device."""
        return self._blocks.get_device_tensor(self._runner.input_batch.num_reqs)

    @property
    def _blocks(self) -> Any:
        return self._runner.input_batch.block_table[self._group_id]

    def batch_index(self, req_id: str) -> int:
        """The request's row in the current step's batch."""
        return self._runner.input_batch.req_id_to_index[req_id]

    def span_batch(self, req_ids: Sequence[str], starts: Sequence[int], ends: Sequence[int]) -> RowBatch:
        """The rows from start to end of each request; remains valid after the step, for the blocks of this step."""
        rows = np.array([self.batch_index(req_id) for req_id in req_ids])
        counts = np.subtract(ends, starts)
        table = self._blocks.get_numpy_array()[rows]
        request = np.repeat(np.arange(len(rows)), counts)
        positions = np.concatenate([np.arange(start, end) for start, end in zip(starts, ends, strict=True)])
        slots = table[request, positions // self.block_size].astype(np.int64) * self.block_size
        slots += positions % self.block_size
        query_start_loc = torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
        return RowBatch(
            positions=self._to_device(positions),
            slot_mapping=self._to_device(slots),
            query_start_loc=query_start_loc.to(self._runner.device),
            query_start_loc_cpu=query_start_loc,
            seq_lens=self._to_device(np.array(ends, np.int32)),
            block_table=self._to_device(table),
            max_query_len=int(counts.max()),
            max_seq_len=max(ends),
        )

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._runner.device, non_blocking=True)

    @contextmanager
    def running(self, batch: RowBatch) -> Iterator[None]:
        """Forward context in which the drafter's layers see exactly this batch."""
        if not self._layer_names:
            yield
            return
        num_rows = len(batch.positions)
        common = CommonAttentionMetadata(
            query_start_loc=batch.query_start_loc,
            query_start_loc_cpu=batch.query_start_loc_cpu,
            seq_lens=batch.seq_lens,
            num_reqs=len(batch.seq_lens),
            num_actual_tokens=num_rows,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            block_table_tensor=batch.block_table,
            slot_mapping=batch.slot_mapping,
            causal=True,
            positions=batch.positions,
        )
        metadata = self._builder.build(common_prefix_len=0, common_attn_metadata=common)
        with set_forward_context(
            dict.fromkeys(self._layer_names, metadata),
            self._runner.vllm_config,
            num_tokens=num_rows,
            slot_mapping=dict.fromkeys(self._layer_names, batch.slot_mapping),
        ):
            yield
