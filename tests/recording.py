"""A worker that writes down every drafter pass, and drafts what a script says instead. In tests only.

The drafter computes as always; its logits go to a file, and the script decides which drafts enter the pipeline, so that
right and wrong drafts reach every depth whatever the drafter's weights are.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.scripted import ScriptedDrafter
from vllm_spd.drafters.base import Rows
from vllm_spd.worker.cpu_worker import SPDCPUWorker

__all__ = ["Recorded", "RecordingWorker", "read_records", "recording"]

PATH, SCRIPT = "SPD_TEST_RECORDS", "SPD_TEST_SCRIPT"


@dataclass(frozen=True)
class Recorded:
    """One request in one drafter pass: every token in the pipeline so far, and the draft logits [V] after the last."""

    tokens: tuple[int, ...]
    logits: Tensor


class RecordingWorker(SPDCPUWorker):
    """Use as `worker_cls`, with the environment that `recording` gives."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self.drafting is not None:
            record(self.drafting.drafter)


def recording(records: Path, script: Path) -> dict[str, Any]:
    """Keywords for an EngineProcess that records."""
    worker = f"{RecordingWorker.__module__}.{RecordingWorker.__qualname__}"
    return {"worker_cls": worker, "env": {PATH: str(records), SCRIPT: str(script)}}


def record(drafter: Any) -> None:
    script = ScriptedDrafter(os.environ[SCRIPT])
    path = Path(os.environ[PATH])
    seen: list[tuple[tuple[int, ...], Tensor]] = []
    logits: list[Tensor] = []
    propose, best_tokens = drafter.propose, drafter.best_tokens

    def keep_logits(hidden_NH: Tensor, newest_R: Tensor) -> list[int | None]:
        logits.append(drafter.module.logits(hidden_NH[newest_R]).float().clone())
        return best_tokens(hidden_NH, newest_R)

    def follow_script(rows: Sequence[Rows]) -> list[int | None]:
        logits.clear()
        drafts = propose(rows)
        drafted = [row for row, draft in zip(rows, drafts, strict=True) if draft is not None]
        for row, logits_V in zip(drafted, (one for many in logits for one in many), strict=True):
            seen.append((tuple(row.token(position) for position in range(row.end)), logits_V))
        torch.save(seen, path)
        return script.propose(rows)

    drafter.best_tokens, drafter.propose = keep_logits, follow_script


def read_records(path: Path) -> list[Recorded]:
    """Everything recorded so far."""
    return [Recorded(tokens, logits) for tokens, logits in torch.load(path, weights_only=True)]
