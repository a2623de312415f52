"""Gather and projection of the drafter's rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from vllm_spd.kernels import draft_rows, fused_rows, fused_rows_reference, pack_projections
from vllm_spd.models.rows import RowLayout

GARBAGE = 10**8
"""Slot and position of padding rows: reading there would crash."""


@dataclass(frozen=True)
class Case:
    """Sizes of one call."""

    dtype: torch.dtype
    hidden: int
    num_out: int
    prefixes: tuple[int, ...]
    num_rows: int
    num_anchors: int
    slots: int = 4
    window: int = 5

    def inputs(self, device: str = "cpu") -> tuple[Tensor, Tensor, tuple[int, ...], Tensor, Tensor, Tensor]:
        """Arguments of `fused_rows`: rows of all types in random order, some padding. What no row reads is NaN."""
        generator = torch.Generator().manual_seed(self.num_rows)
        types = torch.randint(-1, len(self.prefixes), (self.num_rows,), generator=generator)
        slots = torch.randint(0, self.slots, (self.num_rows,), generator=generator)
        positions = torch.randint(0, 1000, (self.num_rows,), generator=generator)
        store = torch.full((self.slots, self.window, self.num_anchors, self.hidden), float("nan"))
        for row_type, slot, position in zip(types.tolist(), slots.tolist(), positions.tolist(), strict=True):
            if row_type >= 0:
                prefix = self.prefixes[row_type]
                anchors = torch.randn(prefix, self.hidden, generator=generator)
                store[slot, position % self.window, :prefix] = anchors
        weights = torch.full((len(self.prefixes), self.num_out, self.num_anchors * self.hidden), float("nan"))
        for weight, prefix in zip(weights, self.prefixes, strict=True):
            width = prefix * self.hidden
            weight[:, :width] = torch.randn(self.num_out, width, generator=generator) / width**0.5
        self._fill_read_twice(store, types, slots, positions)
        rows = [torch.where(types < 0, GARBAGE, slots).int(), torch.where(types < 0, GARBAGE, positions), types.int()]
        floats = [tensor.to(device, self.dtype) for tensor in (store, weights)]
        return (*floats, self.prefixes, *(tensor.to(device) for tensor in rows))

    def _fill_read_twice(self, store: Tensor, types: Tensor, slots: Tensor, positions: Tensor) -> None:
        """A place that two rows read must hold the longer prefix."""
        for row_type, slot, position in zip(types.tolist(), slots.tolist(), positions.tolist(), strict=True):
            place = store[slot, position % self.window, : self.prefixes[row_type] if row_type >= 0 else 0]
            place.nan_to_num_(nan=0.5)


CASES = [
    Case(torch.float32, 64, 64, (1, 3), 1, 3),
    Case(torch.float32, 80, 80, (1, 2, 4), 37, 4),
    Case(torch.bfloat16, 576, 40, (2, 5), 9, 5),
    Case(torch.float16, 576, 33, (3, 4), 20, 5, slots=9),
    Case(torch.bfloat16, 80, 80, (1, 2, 4), 3, 4),
    Case(torch.bfloat16, 64, 64, (2, 3), 70, 3, slots=40),
    Case(torch.float32, 64, 64, (2,), 0, 2),
]
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def plain(
    store: Tensor, weights: Tensor, prefixes: tuple[int, ...], slots: Tensor, positions: Tensor, types: Tensor
) -> Tensor:
    """The same row by row, in float64."""
    rows = []
    for slot, position, row_type in zip(slots.tolist(), positions.tolist(), types.tolist(), strict=True):
        if row_type < 0:
            rows.append(torch.zeros(weights.shape[1], dtype=torch.float64))
            continue
        anchors = store[slot, position % store.shape[1], : prefixes[row_type]].flatten().double().cpu()
        rows.append(weights[row_type, :, : len(anchors)].double().cpu() @ anchors)
    return torch.stack(rows) if rows else torch.zeros(0, weights.shape[1], dtype=torch.float64)


def assert_like_plain(out: Tensor, inputs: tuple[Tensor, Tensor, tuple[int, ...], Tensor, Tensor, Tensor]) -> None:
    assert out.dtype == inputs[0].dtype
    tolerance = TOLERANCES[out.dtype]
    torch.testing.assert_close(out.double().cpu(), plain(*inputs), rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_is_what_one_row_after_another_says(case: Case) -> None:
    inputs = case.inputs()
    inputs = (*inputs[:3], *(torch.where(inputs[5] < 0, 0, tensor) for tensor in inputs[3:5]), inputs[5])
    assert_like_plain(fused_rows(*inputs), inputs)


def test_rows_of_a_cycle() -> None:
    """Request 0 at position 9, request 1 at position 1: rows of distance 2, 1, 0 and 1, 0."""
    layout = RowLayout(2, (2, 2), (0, 2, 4))
    assert layout.row_types == (2, 3)
    store = torch.arange(2.0 * 5 * 3).view(2, 5, 3, 1)
    projections = pack_projections([torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 1.0, 100.0]])], 3)
    types = torch.tensor([layout.projection_index(distance) for distance in layout.distances], dtype=torch.int32)
    requests = torch.tensor([[9, 1], [1, 0], [3, 2], [0, 1]], dtype=torch.int32)
    rows = draft_rows(*requests, torch.zeros(2, 3, dtype=torch.int32), types, 4, 5)
    out = fused_rows(store, projections, layout.row_types, rows.slots, rows.positions, rows.types, rows.order)
    anchors = [
        store[1, 2].sum() + 99 * store[1, 2, 2],
        *(store[s, p, :2].sum() for s, p in [(1, 3), (1, 4), (0, 0), (0, 1)]),
    ]
    assert out.flatten().tolist() == [float(value) for value in anchors]


def test_packing_pads_with_zeros() -> None:
    packed = pack_projections([torch.ones(2, 3), torch.ones(2, 6)], 9)
    assert packed.shape == (2, 2, 9)
    assert packed.sum((1, 2)).tolist() == [6, 12]
    assert packed[0, :, 3:].eq(0).all()
    with pytest.raises(ValueError, match=r"A projection reads 6 values, but 5 is all that a row has\."):
        pack_projections([torch.ones(2, 6)], 5)


def test_inputs_that_do_not_fit_are_refused() -> None:
    store, weights, prefixes, *rows = Case(torch.float32, 8, 8, (1, 2), 3, 2).inputs()
    with pytest.raises(ValueError, match="do not fit 1 row types, 2 anchors and hidden size 8"):
        fused_rows(store, weights, (2,), *rows)
    with pytest.raises(ValueError, match=r"Prefixes \[1, 3\] must lie between 1 and the number of anchors, 2\."):
        fused_rows(store, weights, (1, 3), *rows)
    with pytest.raises(ValueError, match=r"The store is torch.float32 and the projections are torch.float16\."):
        fused_rows(store, weights.half(), prefixes, *rows)
    with pytest.raises(ValueError, match="must be contiguous"):
        fused_rows(store.transpose(0, 1), weights, prefixes, *rows)
    with pytest.raises(ValueError, match=r"Inputs per row have shapes \[\[3\], \[3\], \[2\]\]\."):
        fused_rows(store, weights, prefixes, *rows[:2], rows[2][:2])


def check_twin(device: str, case: Case) -> None:
    from vllm_spd.kernels.triton_projection import fused_rows_triton

    inputs = case.inputs(device)
    types = inputs[5]
    by_type = torch.where(types < 0, len(case.prefixes), types).argsort(stable=True).int()
    shuffled = torch.randperm(case.num_rows, generator=torch.Generator().manual_seed(0)).int().to(device)
    grouped = fused_rows_triton(*inputs, by_type)
    assert_like_plain(grouped, inputs)
    if case.num_rows < 10:
        assert torch.equal(grouped, fused_rows_triton(*inputs, None))
        assert torch.equal(grouped, fused_rows_triton(*inputs, shuffled))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_agrees(run: Callable, case: Case) -> None:
    run(check_twin, case)


def test_few_rows_are_split_and_many_are_not() -> None:
    from vllm_spd.kernels.triton_projection import plan

    few = plan(3, 2560, [2 * 2560, 5 * 2560], 2, 132)
    assert (few.block_rows, few.splits) == (16, 3)
    many = plan(320, 2560, [2 * 2560, 5 * 2560], 2, 132)
    assert (many.block_rows, many.splits) == (64, 1)
    for num_rows in (1, 20, 100):
        widths = [576 * prefix for prefix in (2, 5)]
        shape = plan(num_rows, 576, widths, 2, 132)
        assert shape.split_width % shape.block_values == 0
        assert (shape.splits - 1) * shape.split_width < max(widths) <= shape.splits * shape.split_width


def test_unknown_dtypes_are_refused() -> None:
    from vllm_spd.kernels.triton_projection import fused_rows_triton

    with pytest.raises(ValueError, match=r"The kernels know float16, bfloat16 and float32, not torch.float64\."):
        fused_rows_triton(*Case(torch.float64, 8, 8, (1, 2), 3, 2).inputs(), None)


def check_reference(device: str) -> None:
    inputs = CASES[0].inputs(device)
    assert_like_plain(fused_rows_reference(*inputs), inputs)
    assert_like_plain(fused_rows(*inputs), inputs)


def test_dispatch_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    check_reference("cuda")
