"""The ledger of one request, against a plain list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_spd.control.ledger import Ledger, Verdict


def ledger_with(*drafts: int) -> Ledger:
    ledger = Ledger()
    for draft in drafts:
        ledger.propose(draft)
        ledger.dispatch()
    return ledger


def test_a_right_draft_is_accepted_and_the_rest_stay() -> None:
    ledger = ledger_with(7, 8, 9)
    assert ledger.verify(7) is Verdict.ACCEPTED
    assert list(ledger.in_flight) == [8, 9]


def test_a_wrong_draft_voids_everything_behind_it() -> None:
    ledger = ledger_with(7, 8, 9)
    ledger.propose(10)
    assert ledger.verify(6) is Verdict.REJECTED
    assert not ledger.in_flight and ledger.proposed is None


def test_a_token_without_a_draft_voids_a_proposal_that_comes_too_late() -> None:
    ledger = Ledger()
    ledger.propose(5)
    assert ledger.verify(5) is Verdict.UNDRAFTED
    assert ledger.proposed is None


def test_a_newer_proposal_replaces_an_older_one() -> None:
    ledger = Ledger()
    ledger.propose(1)
    ledger.propose(2)
    ledger.dispatch()
    assert list(ledger.in_flight) == [2] and ledger.proposed is None


def test_nothing_can_be_dispatched_without_a_proposal() -> None:
    with pytest.raises(AssertionError, match="nothing was proposed"):
        Ledger().dispatch()


@given(st.lists(st.tuples(st.sampled_from(["propose", "dispatch", "verify", "void"]), st.integers(0, 2))))
def test_any_sequence_agrees_with_a_list(steps: list[tuple[str, int]]) -> None:
    ledger, flight, proposed = Ledger(), list[int](), None
    for step, token in steps:
        if step == "propose":
            ledger.propose(token)
            proposed = token
        elif step == "dispatch" and proposed is not None:
            ledger.dispatch()
            flight, proposed = [*flight, proposed], None
        elif step == "verify":
            accepted = flight[:1] == [token]
            assert (ledger.verify(token) is Verdict.ACCEPTED) == accepted
            flight, proposed = (flight[1:], proposed) if accepted else ([], None)
        elif step == "void":
            ledger.void()
            flight, proposed = [], None
        assert (list(ledger.in_flight), ledger.proposed) == (flight, proposed)
