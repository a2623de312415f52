"""Row layouts: which depth and which anchors a row of each distance has."""

from __future__ import annotations

import pytest

from vllm_spd.models.rows import RowLayout, default_anchors

FIRST, PAPER = "after_first_stage", "paper"

# (stage layers, anchors, schedule) -> depth, anchors fused and projection of distance 0 … n; row types
TABLE = [
    ((17, 13), (0, 8, 17, 24, 30), FIRST, (1, 1, 2), (3, 3, 5), (0, 0, 1), (3, 5)),
    ((17, 13), (0, 8, 17, 24, 30), PAPER, (0, 1, 2), (1, 3, 5), (0, 1, 2), (1, 3, 5)),
    ((8, 8, 8, 8), (0, 8, 24, 31, 32), PAPER, (0, 1, 2, 3, 4), (1, 2, 2, 3, 5), (0, 1, 1, 2, 3), (1, 2, 3, 5)),
    ((8, 8, 8, 8), (0, 8, 24, 31), FIRST, (1, 1, 2, 3, 4), (2, 2, 2, 3, 4), (0, 0, 0, 1, 2), (2, 3, 4)),
    ((0, 4, 4), (0, 4, 8), FIRST, (1, 1, 2, 3), (1, 1, 2, 3), (0, 0, 1, 2), (1, 2, 3)),
    ((6,), (0, 3, 6), PAPER, (0, 1), (1, 3), (0, 1), (1, 3)),
    ((3, 3), (0,), PAPER, (0, 1, 2), (1, 1, 1), (0, 0, 0), (1,)),
]


@pytest.mark.parametrize(("stages", "anchors", "schedule", "depths", "counts", "projections", "types"), TABLE)
def test_layout(stages, anchors, schedule, depths, counts, projections, types) -> None:
    layout = RowLayout(len(stages), stages, anchors, schedule)
    assert tuple(layout.depth(d) for d in layout.distances) == depths
    assert tuple(layout.num_anchors(d) for d in layout.distances) == counts
    assert tuple(layout.projection_index(d) for d in layout.distances) == projections
    assert layout.row_types == types
    assert layout.depth(99) == len(stages)
    assert layout.boundary(0) == 0
    assert layout.boundary(len(stages)) == layout.total_layers


def test_a_row_never_reads_what_its_stages_have_not_computed() -> None:
    for stages, anchors, schedule, *_ in TABLE:
        layout = RowLayout(len(stages), stages, anchors, schedule)
        for distance in layout.distances:
            for anchor in anchors[: layout.num_anchors(distance)]:
                assert layout.anchor_owner(anchor) < max(1, layout.depth(distance))


@pytest.mark.parametrize(
    ("anchor", "owner"), [(0, 0), (1, 0), (8, 0), (9, 1), (16, 1), (17, 2), (24, 2), (25, 3), (32, 3)]
)
def test_anchor_owner(anchor: int, owner: int) -> None:
    assert RowLayout(4, (8, 8, 8, 8), (0, 8)).anchor_owner(anchor) == owner


def test_anchor_owner_skips_empty_stages() -> None:
    layout = RowLayout(3, (0, 4, 4), (0, 4, 8))
    assert [layout.anchor_owner(a) for a in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


@pytest.mark.parametrize(("query", "gap", "seen"), [(0, 0, 0), (0, 1, 1), (0, 2, 2), (0, 7, 2), (1, 1, 2), (2, 5, 2)])
def test_key_distance(query: int, gap: int, seen: int) -> None:
    assert RowLayout(2, (4, 4), (0, 4)).key_distance(query, gap) == seen


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"num_stages": 0, "stage_layers": ()}, "at least 1"),
        ({"num_stages": 3}, "num_stages is 3"),
        ({"stage_layers": (9, -1)}, "0 or more"),
        ({"stage_layers": (0, 0)}, "at least 1 in total"),
        ({"depth_schedule": "late"}, "paper, after_first_stage"),
        ({"anchors": ()}, "must start with 0"),
        ({"anchors": (1, 4)}, "must start with 0"),
        ({"anchors": (0, 4, 4)}, "strictly increasing"),
        ({"anchors": (0, 9)}, "beyond the target's last layer"),
    ],
)
def test_refusals_are_one_sentence(change: dict, word: str) -> None:
    good = {"num_stages": 2, "stage_layers": (4, 4), "anchors": (0, 4, 8)}
    with pytest.raises(ValueError, match=word) as refusal:
        RowLayout(**(good | change))
    assert "\n" not in str(refusal.value)


def test_distances_and_anchors_outside_are_refused() -> None:
    layout = RowLayout(2, (4, 4), (0, 4, 8))
    with pytest.raises(ValueError, match="negative"):
        layout.depth(-1)
    with pytest.raises(ValueError, match="does not exist"):
        layout.anchor_owner(9)


@pytest.mark.parametrize(
    ("stage_layers", "anchors"),
    [
        ((8,) * 4, (0, 8, 24, 31, 32)),
        ((4,) * 8, (0, 4, 12, 24, 31)),
        ((15, 15), (0, 15, 29, 30)),
        ((9,) * 4, (0, 9, 27, 35, 36)),
        ((16, 14), (0, 16, 29, 30)),
        ((0, 16, 14), (0, 16, 29, 30)),
    ],
)
def test_default_anchors(stage_layers: tuple[int, ...], anchors: tuple[int, ...]) -> None:
    assert default_anchors(stage_layers) == anchors
