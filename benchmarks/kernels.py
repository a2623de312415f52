"""The drafter's kernels on a GPU, beside torch and the memory-bandwidth limit.

    python -m benchmarks.kernels [--hidden 2560] [--vocabulary 32768] [--requests 1 8 64] [--json FILE]

The limit of a kernel is the bytes it must move (weights once, rows in, results out) divided by the rate of a large copy
on the same GPU. Each figure is the median over the repeats, timed by CUDA events, with the L2 cache flushed before each
one. Torch runs the references, which read row counts back to the host and wait for that; for the head also
torch.compile of the reference.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from vllm_spd.kernels import (
    draft_rows,
    draft_rows_reference,
    fused_rows,
    fused_rows_reference,
    norm_head_argmax,
    norm_head_argmax_reference,
)
from vllm_spd.models.rows import RowLayout, default_anchors

STAGES, LAYERS = 4, 32
BLOCK_SIZE, POSITION = 16, 1000
COPY_BYTES = 1 << 30
FLUSH_BYTES = 256 << 20
"""Larger than any L2 cache."""


@dataclass(frozen=True)
class Row:
    """One line of the table; times in microseconds. `compiled_us` is None where torch.compile is not measured."""

    kernel: str
    requests: int
    triton_us: float
    torch_us: float
    compiled_us: float | None
    limit_us: float

    @property
    def of_limit(self) -> float:
        """Share of the memory-bandwidth limit that the Triton kernel reaches."""
        return self.limit_us / self.triton_us


class Timer:
    """Median time of a call on the current GPU, without what earlier calls left in its cache."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def __call__(self, function: Callable[[], object]) -> float:
        """Microseconds."""
        for _ in range(5):
            function()
        return statistics.median(self._once(function) for _ in range(self.repeats))

    def _once(self, function: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        start.record()
        function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1000

    def bytes_per_us(self) -> float:
        """Rate of a copy, reads and writes counted."""
        source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        return 2 * COPY_BYTES / self(lambda: target.copy_(source))


class Cycle:
    """Inputs of one cycle of R requests, all n + 1 rows each, in bfloat16."""

    def __init__(self, requests: int, hidden: int, vocabulary: int) -> None:
        stage_layers = (LAYERS // STAGES,) * STAGES
        self.layout = RowLayout(STAGES, stage_layers, default_anchors(stage_layers))
        anchors, distances = len(self.layout.anchors), self.layout.distances
        self.types = _integers([self.layout.projection_index(distance) for distance in distances])
        self.num_rows = requests * len(distances)
        numbers = [[POSITION] * requests, list(range(requests)), [len(distances)] * requests, list(range(requests))]
        self.requests = _integers(numbers)
        blocks = POSITION // BLOCK_SIZE + 1
        self.block_table = torch.arange(requests * blocks, dtype=torch.int32, device="cuda").view(requests, blocks)
        self.store = _floats(requests, 2 * STAGES + 1, anchors, hidden)
        self.projections = _floats(len(self.layout.row_types), hidden, anchors * hidden)
        self.norm, self.head = _floats(hidden), _floats(vocabulary, hidden)
        self.token_ids = torch.arange(vocabulary, device="cuda")
        self.rows = draft_rows(*self.row_arguments)
        self.hidden = _floats(self.num_rows, hidden)

    @property
    def row_arguments(self) -> tuple:
        return (*self.requests, self.block_table, self.types, BLOCK_SIZE, self.num_rows)

    @property
    def projection_arguments(self) -> tuple:
        rows = self.rows
        return (self.store, self.projections, self.layout.row_types, rows.slots, rows.positions, rows.types)

    @property
    def head_arguments(self) -> tuple:
        return (self.hidden, self.norm, 1e-6, self.head, self.token_ids, self.rows.newest)

    def row_bytes(self) -> int:
        """Per-request numbers, one block number per row, and everything written."""
        return sum(map(_bytes, (self.requests, *self.rows))) + 4 * self.num_rows

    def projection_bytes(self) -> int:
        """Weights up to each type's prefix, the anchors of every row, the result."""
        hidden = self.store.shape[-1]
        prefixes = self.layout.row_types
        anchors = sum(prefixes[row_type] for row_type in self.rows.types.tolist())
        return 2 * hidden * (hidden * sum(prefixes) + anchors + self.num_rows)

    def head_bytes(self) -> int:
        """Head, norm and the newest rows."""
        newest = len(self.rows.newest) * self.hidden.shape[-1] * self.hidden.element_size()
        return _bytes(self.head) + _bytes(self.norm) + newest


def measure(cycle: Cycle, timer: Timer, bytes_per_us: float) -> list[Row]:
    """One row per kernel."""
    requests = len(cycle.rows.seq_lens)
    rows, projection, head = cycle.row_arguments, cycle.projection_arguments, cycle.head_arguments
    compiled = torch.compile(norm_head_argmax_reference)
    return [
        Row(
            "draft_rows",
            requests,
            timer(lambda: draft_rows(*rows)),
            timer(lambda: draft_rows_reference(*rows)),
            None,
            cycle.row_bytes() / bytes_per_us,
        ),
        Row(
            "fused_rows",
            requests,
            timer(lambda: fused_rows(*projection, cycle.rows.order)),
            timer(lambda: fused_rows_reference(*projection)),
            None,
            cycle.projection_bytes() / bytes_per_us,
        ),
        Row(
            "norm_head_argmax",
            requests,
            timer(lambda: norm_head_argmax(*head)),
            timer(lambda: norm_head_argmax_reference(*head)),
            timer(lambda: compiled(*head)),
            cycle.head_bytes() / bytes_per_us,
        ),
    ]


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = ["| kernel | requests | Triton, us | torch, us | torch.compile, us | limit, us | of limit |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        compiled = "" if row.compiled_us is None else f"{row.compiled_us:.1f}"
        times = f"{row.triton_us:.1f} | {row.torch_us:.1f} | {compiled} | {row.limit_us:.1f}"
        lines.append(f"| {row.kernel} | {row.requests} | {times} | {row.of_limit:.0%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the drafter's kernels on a GPU.")
    parser.add_argument("--hidden", type=int, default=2560, help="hidden size")
    parser.add_argument("--vocabulary", type=int, default=32768, help="draft vocabulary")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64], help="batch sizes")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("No GPU here: the kernels are measured on one, and the CPU path is plain torch.")
        return
    timer = Timer(arguments.repeats)
    rate = timer.bytes_per_us()
    rows: list[Row] = []
    for requests in arguments.requests:
        rows += measure(Cycle(requests, arguments.hidden, arguments.vocabulary), timer, rate)
    gpu = torch.cuda.get_device_name()
    print(
        f"{gpu}, copies at {rate / 1000:.0f} GB/s, hidden size {arguments.hidden}, {arguments.vocabulary} draft tokens"
    )
    print(table(rows))
    if arguments.json:
        figures = {"gpu": gpu, "copy_gb_per_s": rate / 1000, "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


def _integers(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def _floats(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


if __name__ == "__main__":
    main()
