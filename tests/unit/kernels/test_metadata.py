"""The drafter's batch of one cycle."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_spd.kernels import DraftRows, draft_rows, draft_rows_reference

BLOCK_SIZE = 4
TYPES = (0, 0, 1, 2)
"""Row types of distance 0 … 3."""


def make_requests(positions: list[int], counts: list[int], dtype: torch.dtype = torch.int32) -> tuple[Tensor, ...]:
    """Newest positions, slots, counts, block rows, block table; slots and block rows are scattered."""
    size = len(positions)
    generator = torch.Generator().manual_seed(size)
    slots = torch.randperm(size + 3, generator=generator)[:size]
    block_rows = torch.randperm(size + 2, generator=generator)[:size]
    blocks = max(positions, default=0) // BLOCK_SIZE + 1
    table = torch.randint(0, 1000, (size + 2, blocks + 1), dtype=torch.int32, generator=generator)
    numbers = torch.stack([torch.tensor(positions), slots, torch.tensor(counts), block_rows]).to(dtype)
    return (*numbers, table[:, :blocks])


def ragged(size: int) -> tuple[list[int], list[int]]:
    positions = [(7 * request) % 23 for request in range(size)]
    return positions, [1 + (request * request) % min(4, position + 1) for request, position in enumerate(positions)]


def plain(positions: list[int], counts: list[int], num_rows: int, inputs: tuple[Tensor, ...]) -> dict[str, list[int]]:
    """The same in plain Python."""
    _, slots, _, block_rows, table = inputs
    rows, starts = [], [0]
    for request, (newest, count) in enumerate(zip(positions, counts, strict=True)):
        for distance in reversed(range(count)):
            position = newest - distance
            block = int(table[block_rows[request], position // BLOCK_SIZE])
            place = block * BLOCK_SIZE + position % BLOCK_SIZE
            rows.append((position, TYPES[distance], int(slots[request]), place))
        starts.append(len(rows))
    rows += [(0, -1, 0, -1)] * (num_rows - len(rows))
    return {
        "positions": [row[0] for row in rows],
        "types": [row[1] for row in rows],
        "slots": [row[2] for row in rows],
        "slot_mapping": [row[3] for row in rows],
        "order": sorted(range(num_rows), key=lambda row: (rows[row][1] < 0, rows[row][1], row)),
        "query_start_loc": starts,
        "seq_lens": [position + 1 for position in positions],
        "newest": [start - 1 for start in starts[1:]],
    }


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 4)), max_size=6), st.integers(0, 5))
def test_reference_is_what_plain_python_says(requests: list[tuple[int, int]], padding: int) -> None:
    positions = [position for position, _ in requests]
    counts = [min(count, position + 1) for position, count in requests]
    num_rows = sum(counts) + padding
    inputs = make_requests(positions, counts)
    rows = draft_rows(*inputs, torch.tensor(TYPES), BLOCK_SIZE, num_rows)
    assert {name: value.tolist() for name, value in rows._asdict().items()} == plain(
        positions, counts, num_rows, inputs
    )


def test_default_number_of_rows_needs_no_count() -> None:
    rows = draft_rows(*make_requests([9, 0], [4, 1]), torch.tensor(TYPES), BLOCK_SIZE)
    assert rows.types.tolist() == [2, 1, 0, 0, 0, -1, -1, -1]
    assert rows.positions.tolist() == [6, 7, 8, 9, 0, 0, 0, 0]


def test_dtypes() -> None:
    rows = draft_rows(*make_requests([9], [4], torch.int64), torch.tensor(TYPES), BLOCK_SIZE)
    wide = {"positions", "slot_mapping", "newest"}
    assert {name: value.dtype for name, value in rows._asdict().items()} == {
        name: torch.int64 if name in wide else torch.int32 for name in DraftRows._fields
    }


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_rows is 4, but there are 5 rows\."):
        draft_rows(*make_requests([9, 0], [4, 1]), torch.tensor(TYPES), BLOCK_SIZE, 4)


def test_inputs_that_do_not_fit_are_refused() -> None:
    newest, slots, counts, block_rows, table = make_requests([9, 0], [4, 1])
    types = torch.tensor(TYPES)
    with pytest.raises(ValueError, match=r"Inputs per request have shapes \[\[2\], \[1\], \[2\], \[2\]\]\."):
        draft_rows(newest, slots[:1], counts, block_rows, table, types, BLOCK_SIZE)
    columns = torch.stack([newest, slots], dim=1)
    with pytest.raises(ValueError, match="must be contiguous"):
        draft_rows(columns[:, 0], columns[:, 1], counts, block_rows, table, types, BLOCK_SIZE)


def check_twin(device: str, size: int, num_rows: int, dtype: torch.dtype) -> None:
    from vllm_spd.kernels.triton_metadata import draft_rows_triton

    inputs = [tensor.to(device) for tensor in make_requests(*ragged(size), dtype)]
    arguments = (*inputs, torch.tensor(TYPES, dtype=torch.int32, device=device), BLOCK_SIZE, num_rows)
    expected, rows = draft_rows_reference(*arguments), draft_rows_triton(*arguments)
    for name, value, wanted in zip(DraftRows._fields, rows, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    ("size", "padding", "dtype"),
    [
        (0, 0, torch.int32),
        (0, 5, torch.int32),
        (1, 0, torch.int32),
        (1, 70, torch.int32),
        (5, 3, torch.int64),
        (140, 9, torch.int32),
    ],
)
def test_triton_agrees(run: Callable, size: int, padding: int, dtype: torch.dtype) -> None:
    run(check_twin, size, sum(ragged(size)[1]) + padding, dtype)


def check_dropped_rows(device: str) -> None:
    from vllm_spd.kernels.triton_metadata import draft_rows_triton

    inputs = [tensor.to(device) for tensor in make_requests([9, 7], [4, 4])]
    rows = draft_rows_triton(*inputs, torch.tensor(TYPES, dtype=torch.int32, device=device), BLOCK_SIZE, 6)
    assert rows.positions.tolist() == [6, 7, 8, 9, 4, 5]
    assert rows.types.tolist() == [2, 1, 0, 0, 2, 1]


def test_triton_drops_rows_beyond_the_end(run: Callable) -> None:
    run(check_dropped_rows)
