"""Acceptance and what follows from it."""

from __future__ import annotations

import pytest
import torch

from tests.unit.training.test_pdm import random_pdm, small
from vllm_spd.training.measure import Measures, hits_and_overlap, speedup, tokens_per_cycle

# acceptance, stages -> tokens per cycle, speed-up
EXPECTED = [(1.0, 4, 1.0, 4.0), (0.8, 2, 1 / 1.2, 1.667), (0.8, 4, 1 / 1.6, 2.5), (0.82, 8, 1 / 2.26, 3.54)]


@pytest.mark.parametrize(("acceptance", "stages", "tokens", "times"), EXPECTED)
def test_expected_speed(acceptance: float, stages: int, tokens: float, times: float) -> None:
    assert tokens_per_cycle(acceptance, stages) == pytest.approx(tokens)
    assert speedup(acceptance, stages) == pytest.approx(times, abs=1e-3)


def test_sums_and_distances() -> None:
    measures = Measures()
    measures.add(torch.tensor([True, True, False, True]), torch.tensor([1.0, 0.5, 0.0, 0.5]))
    more = Measures()
    more.add(torch.tensor([False, True]), torch.tensor([0.5, 0.5]))
    measures += more
    assert measures.acceptance == pytest.approx(4 / 6)
    assert measures.sampled_acceptance == pytest.approx(0.5)
    # first drafts: T (start), T (after the miss), F (start), T (after the miss); second: T; third: F
    assert measures.by_distance()[:4] == pytest.approx([3 / 4, 1.0, 0.0, 0.0])


def test_overlap_counts_the_whole_vocabulary() -> None:
    model = random_pdm(small(head="own")).float()
    head = torch.randn(40, 32)
    model.draft_token_ids.copy_(torch.arange(12) * 3)
    model.bind_head(head[model.draft_token_ids])
    final = torch.randn(5, 32)
    with torch.no_grad():
        full = model.norm(final) @ head.T
        draft = torch.randn(5, 12)
        hits, overlap = hits_and_overlap(model, draft, final, full.argmax(-1), full.logsumexp(-1))
        q = torch.zeros(5, 40).index_copy(1, model.draft_token_ids, draft.softmax(-1))
    torch.testing.assert_close(overlap, torch.minimum(full.softmax(-1), q).sum(-1))
    assert torch.equal(hits, q.argmax(-1) == full.argmax(-1))
