"""Measures of a finished drafter on held-out data, set by set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm

from vllm_spd.training.data import Sample, read_samples
from vllm_spd.training.features import collate
from vllm_spd.training.initialise import bind_target, check_layers
from vllm_spd.training.measure import Measures, hits_and_overlap
from vllm_spd.training.pdm import PDM
from vllm_spd.training.target import Target

__all__ = ["evaluate_head", "measure_samples"]


def evaluate_head(
    head: str, data: Sequence[str], target_path: str | None, max_length: int, batch_size: int, device: str = "cpu"
) -> dict[str, dict[str, Any]]:
    """Acceptance per set (the file's name, or a record's `source`) and over all, as plain numbers for JSON.

    Raises ValueError when the drafter does not fit the target.
    """
    model = PDM.from_pretrained(head, dtype=torch.float32).to(device).eval()
    target = Target.load(target_path or model.config.base_model, device=device)
    check_fit(model, target)
    bind_target(model, target)
    sets: dict[str, list[Sample]] = {}
    for sample in read_samples(data, target.tokenizer, max_length)[0]:
        sets.setdefault(sample.source, []).append(sample)
    measures = {name: measure_samples(model, target, samples, batch_size) for name, samples in sets.items()}
    whole = Measures()
    for part in measures.values():
        whole += part
    return {name: numbers_of(part) for name, part in [*measures.items(), ("all", whole)]}


def check_fit(model: PDM, target: Target) -> None:
    check_layers(target, model.config.stage_layers)
    if (model.config.hidden_size, model.config.vocab_size) != (target.config.hidden_size, target.config.vocab_size):
        raise ValueError(
            "The drafter was made for a target of another hidden size or vocabulary: pass its own --target."
        )


@torch.no_grad()
def measure_samples(model: PDM, target: Target, samples: Sequence[Sample], batch_size: int) -> Measures:
    """Run target and drafter over these samples, in order of length."""
    measures = Measures()
    layers = [*model.layout.anchors, target.num_layers]
    ordered = sorted(samples, key=lambda sample: len(sample.input_ids))
    for start in tqdm(range(0, len(ordered), batch_size), unit="batch"):
        batch = collate_samples(ordered[start : start + batch_size])
        batch = {name: value.to(target.head_weight.device) for name, value in batch.items()}
        hidden = target.hidden_states(batch["input_ids"], layers)
        final = hidden[:, :, -1][batch["loss_mask"]]
        teaching = target.teach(final)
        anchors = hidden[:, :, :-1].to(model.dtype)
        rows = model.draft_hidden(anchors, batch["position_ids"], batch["loss_mask"])
        logits = torch.nn.functional.linear(rows, model.head_rows().to(rows.dtype)).float()
        values = hits_and_overlap(model, logits, final, teaching.top1, teaching.logsumexp)
        lengths = batch["loss_mask"].sum(1).tolist()
        for hits, overlap in zip(values[0].split(lengths), values[1].split(lengths), strict=True):
            measures.add(hits, overlap)
    return measures


def collate_samples(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    return collate(
        [{"input_ids": torch.from_numpy(s.input_ids).long(), "loss_mask": torch.from_numpy(s.loss)} for s in samples]
    )


def numbers_of(measures: Measures) -> dict[str, Any]:
    return {
        "tokens": measures.rows,
        "acceptance": round(measures.acceptance, 4),
        "acceptance_t1": round(measures.sampled_acceptance, 4),
        "by_distance": [round(value, 4) for value in measures.by_distance()],
    }
