"""The drafters that read hidden states compute in the pipeline what their Hugging Face twins compute offline."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from tests.engines import INSIDE, PLAIN, EnginePool, EngineProcess
from tests.recording import Recorded, read_records, recording
from tests.scripted import write_answers
from vllm_spd.models.checkpoint import expected_shapes, write_checkpoint
from vllm_spd.models.pdm_config import PDMConfig
from vllm_spd.training.families import layer_values_of
from vllm_spd.training.pdm import PDM
from vllm_spd.training.target import Target

GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}


@dataclass(frozen=True)
class Head:
    """A random drafter for the tiny target of 8 layers."""

    name: str
    stage_layers: tuple[int, ...]
    anchors: tuple[int, ...]
    num_layers: int = 1
    kind: str = "pdm"
    depth_schedule: str = "after_first_stage"
    head: str = "own"
    slow: bool = False

    def write(self, folder: Path, target: Target) -> Path:
        values = layer_values_of(target.config)
        config = PDMConfig(
            kind=self.kind,
            num_stages=len(self.stage_layers),
            stage_layers=list(self.stage_layers),
            anchors=list(self.anchors),
            depth_schedule=self.depth_schedule,
            num_layers=self.num_layers,
            draft_vocab_size=100,
            head=self.head,
            **values,
        )
        generator = torch.Generator().manual_seed(0)
        shapes = expected_shapes(config)
        tensors = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        tensors["norm.weight"] = target.norm_factor()
        tensors["draft_token_ids"] = torch.arange(3, 503, 5)
        write_checkpoint(folder, config, tensors)
        return folder


HEADS = (
    Head("two stages, two layers", (5, 3), (0, 3, 5, 8), num_layers=2),
    Head("four stages, the authors' schedule", (2, 2, 2, 2), (0, 2, 5, 7), depth_schedule="paper"),
    Head("a stage without anchors", (3, 2, 3), (0, 3, 8), slow=True),
    Head("a first rank that only drafts", (0, 4, 4), (0, 4, 8), slow=True),
    Head("early exit", (5, 3), (0, 5), kind="early_exit", slow=True),
)


def case(head: Head) -> Any:
    return pytest.param(head, id=head.name, marks=[pytest.mark.slow] if head.slow else [])


@pytest.mark.parametrize("head", map(case, HEADS))
def test_every_pass_equals_the_twin(
    head: Head, engines: EnginePool, tiny: Path, target: Target, tmp_path: Path
) -> None:
    """Two thirds of the drafts are right, so flushes happen at every depth; one prompt is prefilled in chunks.

    Fails when a row takes the anchors of another distance, when a flush leaves a row behind, or when the prompt's keys
    are missing: each of these moves the logits by more than 0.1.
    """
    draw = random.Random(7)
    prompts = [[draw.randrange(3, 500) for _ in range(length)] for length in (1, 2, 9, 40, 150)]
    plain = engines.get(model=str(tiny), **PLAIN).generate(prompts, GREEDY)
    script = write_answers(tmp_path / "script.json", plain, acceptance=0.67)
    options = recording(tmp_path / "records.pt", script)
    options["env"] |= INSIDE
    with EngineProcess(
        model=str(tiny),
        pipeline_parallel_size=len(head.stage_layers),
        speculative_config={"method": "spd", "model": str(head.write(tmp_path / "head", target))},
        dtype="float32",
        max_num_batched_tokens=64,
        max_num_seqs=8,
        **options,
    ) as engine:
        assert [one.token_ids for one in engine.generate(prompts, GREEDY)] == [one.token_ids for one in plain]
    records = read_records(tmp_path / "records.pt")
    assert len(records) > 60 and len({len(record.tokens) for record in records}) > 60
    twin = PDM.from_pretrained(tmp_path / "head").eval()
    worst = max(float((record.logits - twin_logits(twin, target, record)).abs().max()) for record in records)
    assert worst < 1e-4 * max(1.0, float(records[0].logits.abs().max()))


@torch.no_grad()
def twin_logits(twin: PDM, target: Target, record: Recorded) -> Tensor:
    """Draft logits [V] after the last token of the sequence, from one pass over the whole of it."""
    ids = torch.tensor([record.tokens])
    anchors = target.hidden_states(ids, twin.config.anchors)
    positions = torch.arange(ids.shape[1])[None]
    newest = torch.zeros_like(ids, dtype=torch.bool)
    newest[0, -1] = True
    return linear(twin.draft_hidden(anchors, positions, newest)[0], twin.head_rows())
