"""SPD's additions to vLLM's V1 model runner. The only file that knows V1's internals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_spd.config import SPDConfig
from vllm_spd.worker.seeds import SeededStates

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

__all__ = ["PipelineGaps", "SPDModelRunner", "adopt"]


def adopt(runner: GPUModelRunner, spd: SPDConfig) -> None:
    """Give a runner that vLLM has just constructed SPD's behaviour.

    vLLM's worker constructs its runner in the middle of `init_device` and offers no factory, so the class is changed
    on the finished object. The new class only overrides methods.
    """
    base = type(runner)
    runner.__class__ = type(f"SPD{base.__name__}", (SPDModelRunner, base), {})
    cast(SPDModelRunner, runner).init_spd(spd)


class PipelineGaps(GPUModelRunner):
    """What plain vLLM lacks to run pipeline stages eagerly on CPU."""

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Allocate the receive buffers of later ranks, which vLLM leaves to a dummy run that eager CPU mode skips."""
        super().initialize_kv_cache(*args, **kwargs)
        if self.intermediate_tensors is None and not get_pp_group().is_first_rank:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )


class SPDModelRunner(PipelineGaps):
    """Plain decoding that survives flushes.

    Earlier ranks are told every token they run, drafts included, and must forget the void ones. The last rank knows
    what it sampled, so it recognises a stale row by itself: the row's input token is not the token sampled for that
    position. Such a row is computed, because it is already on its way, but nothing of it is kept.
    """

    def init_spd(self, spd: SPDConfig) -> None:
        """Stand-in for a constructor; see `adopt`."""
        self.spd = spd
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
        """Set every seeded generator to the state that belongs to the position at hand."""
        discarded = self.discard_request_mask.np
        for index, generator in self.input_batch.generators.items():
            req_id = self.input_batch.req_ids[index]
            if not discarded[index]:
                self._seeded.enter(req_id, generator, len(self.requests[req_id].output_token_ids))
        return super()._sample(*args, **kwargs)

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
