"""Carries anchors to the first rank and draft distributions to the last, beside vLLM's own messages.

Both sides know from the stream of scheduler outputs how many rows a step has, so nothing but the rows is sent. Steps
are counted from 0 on every rank; empty steps and ranks without anchors send nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["AnchorReceiver", "Arrival", "DraftReceiver", "Sender", "pipeline_group"]


def pipeline_group(pipeline_ranks: Sequence[Sequence[int]], backend: str, rank: int) -> dist.ProcessGroup:
    """A process group of SPD's own over this rank's pipeline; every rank must call this, in the same order.

    Args:
        pipeline_ranks: global ranks of every pipeline in the world, first stage to last.
        backend: `gloo` or `nccl`.
        rank: this process's global rank.
    """
    mine = None
    for ranks in pipeline_ranks:
        group = dist.new_group(list(ranks), backend=backend)
        if rank in ranks:
            mine = group
    assert mine is not None, f"rank {rank} belongs to no pipeline"
    return mine


class Sender:
    """Sends one tensor per step to one rank, without waiting for it to arrive."""

    def __init__(self, group: dist.ProcessGroup, destination: int, max_in_flight: int) -> None:
        """
        Args:
            group: see `pipeline_group`.
            destination: global rank of the receiver.
            max_in_flight: sends that may be unfinished before one is waited for.
        """
        self._group = group
        self._destination = destination
        self._max_in_flight = max_in_flight
        self._in_flight: deque[tuple[Any, Tensor]] = deque()
        self.num_bytes = 0

    def send(self, rows: Tensor) -> None:
        """Send a copy of one step's rows; the buffer they come from may be overwritten afterwards."""
        while self._in_flight and (len(self._in_flight) > self._max_in_flight or self._in_flight[0][0].is_completed()):
            self._in_flight.popleft()[0].wait()
        copy = rows.contiguous() if not rows.is_contiguous() else rows.clone()
        work = dist.isend(copy, self._destination, group=self._group)
        self._in_flight.append((work, copy))
        self.num_bytes += copy.nbytes


@dataclass(frozen=True)
class Arrival:
    """The anchors that one rank computed in one step, [A, N, H]."""

    step: int
    stage: int
    rows_ANH: Tensor


class AnchorReceiver:
    """On the first rank: takes in what the other ranks send, in the order of steps."""

    def __init__(self, group: dist.ProcessGroup, senders: dict[int, tuple[int, int]], like: Tensor) -> None:
        """
        Args:
            group: see `pipeline_group`.
            senders: stage → (global rank, number of anchors), for stages after the first that own anchors.
            like: an empty tensor [H] with the model's dtype and device.
        """
        self._group = group
        self._senders = senders
        self._like = like
        self._pending: dict[int, deque[tuple[int, Any, Tensor]]] = {stage: deque() for stage in senders}
        self.num_bytes = 0
        self.waited_seconds = 0.0

    def expect(self, step: int, num_tokens: int) -> None:
        """Post the receives of a step that has been dispatched."""
        for stage, (rank, num_anchors) in self._senders.items():
            buffer = self._like.new_empty(num_anchors, num_tokens, self._like.shape[-1])
            work = dist.irecv(buffer, rank, group=self._group)
            self._pending[stage].append((step, work, buffer))

    def collect(self, step: int, num_finished: int) -> list[Arrival]:
        """Everything that the other ranks have computed before this cycle; waits for what is still on the wire.

        Args:
            step: number of the step that the first rank has just run. Stage s then runs step - s, so it has finished
                everything before that.
            num_finished: number of steps whose results the scheduler has seen; every stage has finished them.
        """
        arrivals, started = [], time.perf_counter()
        for stage, pending in self._pending.items():
            done_before = max(step - stage, num_finished)
            while pending and pending[0][0] < done_before:
                number, work, buffer = pending.popleft()
                work.wait()
                self.num_bytes += buffer.nbytes
                arrivals.append(Arrival(number, stage, buffer))
        self.waited_seconds += time.perf_counter() - started
        return arrivals


class DraftReceiver:
    """On the last rank: takes in the packed rows of drafts that the first rank drew, one message at a time."""

    def __init__(self, group: dist.ProcessGroup, first_rank: int, like: Tensor) -> None:
        """
        Args:
            group: see `pipeline_group`; not the anchors' group, whose order of messages is another.
            first_rank: global rank of the first stage.
            like: an empty float32 tensor [1 + V] on the device.
        """
        self._group = group
        self._first_rank = first_rank
        self._like = like
        self._pending: deque[tuple[Any, Tensor]] = deque()

    def expect(self, num_rows: int) -> None:
        """Post the receive of a step's rows."""
        buffer = self._like.new_empty(num_rows, len(self._like))
        self._pending.append((dist.irecv(buffer, self._first_rank, group=self._group), buffer))

    def collect(self) -> Tensor:
        """The rows [R, 1 + V] of the oldest step that is expected; waits for them."""
        work, buffer = self._pending.popleft()
        work.wait()
        return buffer


def backend_of(device: torch.device) -> str:
    """The backend that carries tensors of this device."""
    return "nccl" if device.type == "cuda" else "gloo"
