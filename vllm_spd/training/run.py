"""`vllm-spd train` from end to end: text → features → drafter → checkpoint folder."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from transformers import TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from vllm_spd.models.checkpoint import read_checkpoint
from vllm_spd.models.rows import default_anchors
from vllm_spd.plan import describe, drafter_parameters, split_layers, target_costs
from vllm_spd.training.cache import FeatureCache
from vllm_spd.training.data import Sample, read_samples
from vllm_spd.training.features import SampleDataset, collate
from vllm_spd.training.initialise import bind_target, check_layers, new_pdm
from vllm_spd.training.pdm import PDM
from vllm_spd.training.target import Target
from vllm_spd.training.trainer import PDMTrainer
from vllm_spd.training.vocab import coverage, frequent_tokens

__all__ = ["TrainOptions", "train"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainOptions:
    """Everything that `vllm-spd train` can be told. Layer numbers count from 0; anchors are hidden states 0 … L."""

    target: str
    data: tuple[str, ...]
    out: str
    stages: tuple[int, ...] = (2,)
    """One number: that many stages of equal time. Several: the layers of each stage."""
    kind: str = "pdm"
    num_layers: int = 1
    anchors: tuple[int, ...] | None = None
    depth_schedule: str = "after_first_stage"
    head: str = "tied"
    draft_vocab: int = 8192
    init_layers: tuple[int, ...] | None = None
    intermediate_size: int | None = None
    init_from: str | None = None
    """Checkpoint folder whose weights and draft vocabulary to start from."""
    target_name: str | None = None
    """Name of the target to write into the checkpoint instead of `target`."""
    max_length: int = 1024
    limit: int | None = None
    skip_bad_lines: bool = False
    held_out: float = 0.02
    epochs: float = 6.0
    max_steps: int = -1
    batch_size: int = 8
    accumulate: int = 1
    lr: float = 3e-4
    projection_lr: float = 6e-4
    weight_decay: float = 0.01
    warmup: float = 0.03
    schedule: str = "cosine"
    bf16: bool = True
    seed: int = 0
    eval_steps: int = 200
    save_steps: int = 200
    cache: str | None = None
    """Folder for the feature cache; None runs the target in every step instead."""
    cache_layers: tuple[int, ...] = ()
    """Further hidden states to cache, for trying other anchors later without running the target again."""
    device: str = "auto"


RESUMABLE = ("data", "out", "eval_steps", "save_steps", "cache", "cache_layers", "device", "skip_bad_lines")
"""Options that may change between a run and its continuation."""


def train(options: TrainOptions) -> dict[str, Any]:
    """Train, or continue an interrupted run of the same options, and write the checkpoint folder `options.out`.

    Returns the summary that training.json there holds too. Raises ValueError for options or data that do not fit.
    """
    begun = time.monotonic()
    out = Path(options.out)
    checkpoints = out / "checkpoints"
    target = Target.load(options.target, device=device_of(options))
    stage_layers, anchors = plan_layers(options, target)
    samples, report = read_samples(
        options.data, target.tokenizer, options.max_length, options.skip_bad_lines, options.limit
    )
    logger.info("Data: %s.", report)
    training, held_out = split(samples, options.held_out)
    layers = [*anchors, target.num_layers]
    cache = None
    if options.cache is not None:
        with PartialState().main_process_first():
            cache = FeatureCache.build(Path(options.cache), target, samples, [*layers, *options.cache_layers])
    token_ids = frequent_tokens([samples[index] for index in training], target.config.vocab_size, options.draft_vocab)
    model = build_model(options, target, token_ids, stage_layers, anchors)
    covered = coverage([samples[index] for index in held_out], token_ids)
    logger.info("The draft vocabulary holds %.1f %% of the held-out assistant tokens.", 100 * covered)
    trainer = PDMTrainer(
        model,
        training_arguments(options, checkpoints),
        data_collator=collate,
        train_dataset=SampleDataset(samples, layers, cache, training),
        eval_dataset=SampleDataset(samples, layers, cache, held_out),
        target=target,
        layers=layers,
        projection_lr=options.projection_lr,
    )
    trainer.train(resume_from_checkpoint=last_checkpoint(options, checkpoints))
    final = trainer.evaluate()
    summary = {
        "options": asdict(options),
        "stage_layers": list(stage_layers),
        "anchors": list(anchors),
        "data": str(report),
        "hours": round((time.monotonic() - begun) / 3600, 2),
        "draft_vocabulary_coverage": round(covered, 4),
        "epoch_tokens": int(sum(samples[index].loss.sum() for index in training)),
        "steps": trainer.state.global_step,
        "held_out": final,
        "curve": curve(trainer.state.log_history),
    }
    if trainer.is_world_process_zero():
        save(model, out, summary)
    return summary


def device_of(options: TrainOptions) -> str:
    """The device of this process: with several, `accelerate launch` or `torchrun` gives each one its own."""
    return options.device if options.device != "auto" else str(PartialState().device)


def plan_layers(options: TrainOptions, target: Target) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(layers per stage, anchors). Raises ValueError when they do not fit the target."""
    stage_layers = options.stages if len(options.stages) > 1 else balanced(options, target)
    check_layers(target, stage_layers)
    if options.kind == "early_exit":
        return stage_layers, tuple(sorted({0, stage_layers[0]}))
    return stage_layers, options.anchors or default_anchors(stage_layers)


def balanced(options: TrainOptions, target: Target) -> tuple[int, ...]:
    """Stages that take the same time when the first one drafts and the last one computes the LM head."""
    anchors = len(options.anchors) if options.anchors else 4
    drafter = drafter_parameters(target.config, options.num_layers, options.draft_vocab, anchors)
    costs = target_costs(target.config, drafter)
    stage_layers = split_layers(target.num_layers, options.stages[0], costs)
    logger.info("%s.", describe(stage_layers, costs))
    return stage_layers


def split(samples: Sequence[Sample], share: float) -> tuple[list[int], list[int]]:
    """Indices for training and held-out samples; the split depends on their number only."""
    if len(samples) < 2:
        raise ValueError("Training needs at least 2 samples, one of them held out: give more data.")
    order = np.random.default_rng(0).permutation(len(samples)).tolist()
    count = min(len(samples) - 1, max(1, round(share * len(samples))))
    return sorted(order[count:]), sorted(order[:count])


def build_model(
    options: TrainOptions, target: Target, token_ids: torch.Tensor, stage_layers: Sequence[int], anchors: Sequence[int]
) -> PDM:
    torch.manual_seed(options.seed)
    model = new_pdm(
        target,
        token_ids,
        stage_layers=stage_layers,
        anchors=anchors,
        depth_schedule=options.depth_schedule,
        num_layers=options.num_layers,
        head=options.head,
        kind=options.kind,
        init_layers=options.init_layers,
        intermediate_size=options.intermediate_size,
    )
    if options.init_from is not None:
        start_from(model, options.init_from)
    model.config.base_model = options.target_name or options.target
    bind_target(model, target)
    return model


def start_from(model: PDM, folder: str) -> None:
    """Copy another drafter's weights. Raises ValueError when its layout or sizes differ."""
    config, tensors = read_checkpoint(folder)
    if config.layout != model.layout or config.kind != model.config.kind:
        raise ValueError(
            f"{folder} has other stages, anchors or depths: give the same --stages and --anchors as it has."
        )
    ours = {name: value.shape for name, value in model.state_dict().items()}
    if ours != {name: value.shape for name, value in tensors.items()}:
        raise ValueError(
            f"{folder} has other layers or another draft vocabulary size: give the same options as it has."
        )
    model.load_state_dict(tensors)


def training_arguments(options: TrainOptions, checkpoints: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(checkpoints),
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=options.batch_size,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=options.lr,
        weight_decay=options.weight_decay,
        warmup_steps=options.warmup,
        lr_scheduler_type=options.schedule,
        num_train_epochs=options.epochs,
        max_steps=options.max_steps,
        bf16=options.bf16,
        use_cpu=device_of(options) == "cpu",
        seed=options.seed,
        data_seed=options.seed,
        eval_strategy="steps",
        eval_steps=options.eval_steps,
        save_steps=options.save_steps,
        save_total_limit=2,
        logging_steps=min(20, options.eval_steps),
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        report_to=[],
    )


def last_checkpoint(options: TrainOptions, checkpoints: Path) -> str | None:
    """The checkpoint to continue from. Raises ValueError when it belongs to a run with other options."""
    record = checkpoints / "options.json"
    ours = json.loads(
        json.dumps({f.name: getattr(options, f.name) for f in fields(options) if f.name not in RESUMABLE})
    )
    last = get_last_checkpoint(str(checkpoints)) if checkpoints.exists() else None
    if last is not None and record.exists():
        theirs = json.loads(record.read_text())
        changed = sorted(name for name in ours if ours[name] != theirs.get(name))
        if changed:
            raise ValueError(
                f"{checkpoints} holds a run with other values of {', '.join(changed)}: "
                "repeat them to continue it, or choose another --out."
            )
    checkpoints.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(ours, indent=1))
    return last


def curve(history: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Held-out acceptance over training: one point per evaluation."""
    names = ("step", "epoch", "eval_acceptance", "eval_acceptance_t1")
    return [{name: entry[name] for name in names} for entry in history if "eval_acceptance" in entry]


def save(model: PDM, out: Path, summary: dict[str, Any]) -> None:
    model.to(torch.bfloat16).save_pretrained(out)
    (out / "training.json").write_text(json.dumps(summary, indent=1) + "\n")
