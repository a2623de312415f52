"""What the pipeline counts, and what vLLM is told."""

from __future__ import annotations

from vllm_spd.control.ledger import Verdict
from vllm_spd.control.stats import PipelineStats, to_vllm
from vllm_spd.messages import DraftReport


def stats_of(*verdicts: Verdict) -> PipelineStats:
    stats = PipelineStats(cycles=8)
    for verdict in verdicts:
        stats.observe(verdict)
    return stats


def test_every_token_has_one_verdict() -> None:
    stats = stats_of(Verdict.ACCEPTED, Verdict.ACCEPTED, Verdict.ACCEPTED, Verdict.REJECTED, Verdict.UNDRAFTED)
    assert (stats.tokens, stats.accepted, stats.flushes, stats.undrafted) == (5, 3, 1, 1)
    assert stats.acceptance == 0.75
    assert stats.tokens_per_cycle == 5 / 8


def test_rates_before_the_first_token_are_zero() -> None:
    assert PipelineStats().acceptance == PipelineStats().tokens_per_cycle == 0.0


def test_the_line_says_it_in_words() -> None:
    line = stats_of(Verdict.ACCEPTED, Verdict.REJECTED).line()
    assert line.startswith("SPD: 2 tokens in 8 cycles (0.25 per cycle), acceptance 0.50, 1 flushes")


def test_the_line_says_what_drafting_cost() -> None:
    stats = stats_of(Verdict.ACCEPTED)
    for _ in range(8):
        stats.add(DraftReport(seconds=0.002, waited_seconds=0.0005, num_bytes=100))
    stats.add(DraftReport(num_failures=1))
    expected = "per cycle 2.00 ms of drafting, 0.50 ms of it waiting for 100 bytes of other stages, 1 drafter failures"
    assert expected in stats.line()


def test_restarting_zeroes_every_count() -> None:
    stats = stats_of(Verdict.ACCEPTED)
    before = stats.since
    stats.restart()
    assert stats == PipelineStats(since=stats.since) and stats.since >= before


def test_vllm_hears_of_drafts_one_by_one() -> None:
    stats = to_vllm(3, 1, num_spec_tokens=3)
    assert stats is not None
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (4, 4, 3)


def test_vllm_hears_nothing_of_steps_without_drafts() -> None:
    assert to_vllm(0, 0, num_spec_tokens=3) is None
