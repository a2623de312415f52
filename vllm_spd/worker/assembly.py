"""Puts a rank's parts together after its stage of the target is loaded: taps, exchange and drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import get_pp_group

from vllm_spd.config import DRAFTERS_WITH_CHECKPOINT, SPDConfig
from vllm_spd.drafters.base import Drafter, drafter_class
from vllm_spd.drafters.hidden import HiddenStateDrafter
from vllm_spd.drafters.ngram import NgramDrafter
from vllm_spd.drafters.sampling import DraftSampler
from vllm_spd.models.checkpoint import load_config, read_checkpoint
from vllm_spd.worker.drafting import Drafting, DraftOutlet
from vllm_spd.worker.exchange import AnchorReceiver, DraftReceiver, Sender, backend_of, pipeline_group
from vllm_spd.worker.features import FeatureStore
from vllm_spd.worker.runner_v1 import DraftAttention
from vllm_spd.worker.taps import Taps
from vllm_spd.worker.verify import DraftVerifier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from vllm_spd.models.pdm import PDMModule
    from vllm_spd.models.rows import RowLayout

__all__ = ["AnchorSource", "Parts", "assemble"]


class AnchorSource:
    """On every rank but the first: taps this stage's anchors and sends them after each step."""

    def __init__(self, taps: Taps, sender: Sender) -> None:
        self.taps = taps
        self.sender = sender

    def send(self, num_rows: int) -> None:
        """Send the step that has just run; steps have at least one row."""
        self.sender.send(self.taps.rows(num_rows))


@dataclass
class Parts:
    """What a rank adds to its stage: the first one drafts, later ones send anchors, the last one judges drafts."""

    drafting: Drafting | None = None
    anchors: AnchorSource | None = None
    verifier: DraftVerifier | None = None


def assemble(spd: SPDConfig, runner: GPUModelRunner) -> Parts:
    """What this rank needs; every rank must call this, because process groups are made together."""
    anchor_group = _group(runner) if spd.drafter == "pdm" else None
    draft_group = _group(runner) if spd.draft_sample_method == "probabilistic" else None
    if get_pp_group().is_first_rank:
        drafter = _drafter(spd, runner, anchor_group)
        outlet = None if draft_group is None else _outlet(drafter, runner, draft_group, 2 * spd.num_stages)
        return Parts(drafting=Drafting(drafter, runner, outlet))
    verifies = draft_group is not None and get_pp_group().is_last_rank
    return Parts(
        anchors=None if anchor_group is None else _source(spd, runner, anchor_group),
        verifier=_verifier(spd, runner, draft_group) if verifies else None,
    )


def _outlet(drafter: Drafter, runner: GPUModelRunner, group: dist.ProcessGroup, max_in_flight: int) -> DraftOutlet:
    assert isinstance(drafter, HiddenStateDrafter)
    size = drafter.module.config.draft_vocab_size
    drafter.sampler = DraftSampler(size, runner.model_config.seed, runner.device)
    return DraftOutlet(drafter.sampler, Sender(group, get_pp_group().last_rank, max_in_flight))


def _verifier(spd: SPDConfig, runner: GPUModelRunner, group: dist.ProcessGroup) -> DraftVerifier:
    assert spd.model is not None
    token_ids = read_checkpoint(spd.model)[1]["draft_token_ids"].long()
    like = torch.empty(1 + len(token_ids), device=runner.device)
    return DraftVerifier(runner, DraftReceiver(group, get_pp_group().first_rank, like), token_ids)


def _drafter(spd: SPDConfig, runner: GPUModelRunner, group: dist.ProcessGroup | None) -> Drafter:
    if spd.drafter == "ngram":
        return NgramDrafter(spd)
    if spd.drafter in DRAFTERS_WITH_CHECKPOINT:
        return _hidden_state_drafter(spd, runner, group)
    return drafter_class(spd.drafter)(**spd.drafter_options)


def _hidden_state_drafter(spd: SPDConfig, runner: GPUModelRunner, group: dist.ProcessGroup | None) -> Drafter:
    from vllm_spd.drafters.early_exit import EarlyExitDrafter
    from vllm_spd.drafters.pdm import PDMDrafter
    from vllm_spd.models.pdm import load_pdm

    assert spd.model is not None
    module: PDMModule = load_pdm(runner.vllm_config, spd.model, runner.get_model())
    attention = DraftAttention(runner, module.attention_names)
    layout = module.layout
    if group is None:
        return EarlyExitDrafter(module, _taps(runner, [layout.boundary(1)]), attention)
    taps = _taps(runner, _owned(layout, 0))
    senders = {
        stage: (get_pp_group().ranks[stage], len(owned))
        for stage in range(1, layout.num_stages)
        if (owned := _owned(layout, stage))
    }
    receiver = AnchorReceiver(group, senders, _like(runner))
    return PDMDrafter(module, taps, attention, FeatureStore(layout, _like(runner)), receiver)


def _source(spd: SPDConfig, runner: GPUModelRunner, group: dist.ProcessGroup) -> AnchorSource | None:
    assert spd.model is not None
    owned = _owned(load_config(spd.model).layout, get_pp_group().rank_in_group)
    if not owned:
        return None
    sender = Sender(group, get_pp_group().first_rank, max_in_flight=2 * spd.num_stages)
    return AnchorSource(_taps(runner, owned), sender)


def _owned(layout: RowLayout, stage: int) -> list[int]:
    return [anchor for anchor in layout.anchors if layout.anchor_owner(anchor) == stage]


def _taps(runner: GPUModelRunner, anchors: Sequence[int]) -> Taps:
    num_layers = runner.model_config.get_total_num_hidden_layers()
    return Taps(runner.get_model(), anchors, num_layers, runner.max_num_tokens, _like(runner))


def _like(runner: GPUModelRunner) -> torch.Tensor:
    return torch.empty(runner.model_config.get_hidden_size(), dtype=runner.model_config.dtype, device=runner.device)


def _group(runner: GPUModelRunner) -> dist.ProcessGroup:
    num_columns = runner.parallel_config.tensor_parallel_size
    world = dist.get_world_size()
    pipelines = [list(range(column, world, num_columns)) for column in range(num_columns)]
    return pipeline_group(pipelines, backend_of(runner.device), dist.get_rank())
