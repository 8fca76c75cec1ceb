"""The laws of the ledger if the tokens of some turns are unknown, case by case."""

from __future__ import annotations

import pytest
from rollout_server.core.ledger import Drift, DriftKind, Ledger, Origin, SegmentKind, Turn, pack_logprobs

from tests.support.machine_records import begun, ids, predicts, shown_ledger, shown_segment, spans_of


def interrupted() -> Ledger:
    """A ledger of one turn, followed by a turn without tokens."""
    ledger = begun()
    ledger.main.gap = True
    return ledger


def test_a_gap_is_there_until_the_next_commit() -> None:
    ledger = begun()
    assert ledger.main.gap is False
    ledger.main.gap = True
    ledger.main.gap = True
    assert ledger.main.gap is True
    ledger.main.commit(Turn(4, ids(30), None, None, ids(1, 2, 3, 10, 11, 20, 21)))
    assert ledger.main.gap is False


def test_what_is_skipped_changes_nothing_that_is_recorded() -> None:
    ledger = begun()
    before = shown_ledger(ledger)
    ledger.main.gap = True
    assert shown_ledger(ledger) == before


@pytest.mark.parametrize(
    ("reported", "shared"),
    [
        pytest.param((1, 2, 3, 10, 11, 20, 12, 21), 5, id="extends what is held"),
        pytest.param((1, 2, 3, 10, 11), 5, id="is what is held"),
        pytest.param((1, 2, 3, 9, 11, 20), 3, id="parts from it in an answer"),
        pytest.param((9,), 0, id="parts from it at once"),
        pytest.param((), 0, id="is empty"),
    ],
)
@pytest.mark.parametrize("predicted", [None, predicts(20, closing=[8])])
def test_after_a_gap_any_prompt_opens_a_segment_and_none_is_drift(
    reported: tuple[int, ...], shared: int, predicted: object
) -> None:
    ledger = interrupted()
    first = shown_segment(ledger.segments[0])
    assert ledger.main.commit(Turn(3, ids(30), None, predicted, ids(*reported))) is None  # type: ignore[arg-type]
    segment = ledger.segments[1]
    assert (segment.id, segment.origin) == ("1", Origin(SegmentKind.GAP, "0", shared))
    assert ledger.main.id == "1"
    assert segment.verified
    assert segment.sample().prompt_ids == ids(*reported)
    assert spans_of(ledger) == [("prompt", 3, 0, len(reported)), ("model", 3, len(reported), len(reported) + 1)]
    assert shown_segment(ledger.segments[0]) == first, "recorded segments do not change"


def test_the_answers_of_a_gap_are_masked_with_the_prompt_that_holds_them() -> None:
    ledger = interrupted()
    ledger.main.commit(Turn(3, ids(30), pack_logprobs([-1]), None, ids(1, 2, 3, 10, 11, 20, 12, 21)))
    samples = [segment.sample() for segment in ledger.segments]
    trained = [(s.response_ids, s.response_mask) for s in samples]
    assert trained == [(ids(10, 11), b"\x01\x01"), (ids(30), b"\x01")], "each known sampled token is trained once"
    assert samples[1].logprobs == pack_logprobs([-1])


def test_the_segment_after_a_gap_goes_on_like_any_other() -> None:
    ledger = interrupted()
    ledger.main.commit(Turn(3, ids(30), None, None, ids(7)))
    assert ledger.main.commit(Turn(4, ids(31), None, predicts(40))) is None
    assert ledger.main.commit(Turn(5, ids(32), None, None, ids(7, 30, 40, 31, 50))) is None
    assert [reason for reason, *_ in spans_of(ledger)] == [
        "prompt",
        "model",
        "environment",
        "model",
        "environment",
        "model",
    ]
    drift = ledger.main.commit(Turn(6, ids(33), None, None, ids(7, 31)))
    assert drift == Drift(DriftKind.RETOKENISED, 1, 6, 2)
    assert [segment.origin for segment in ledger.segments] == [
        Origin(SegmentKind.MAIN),
        Origin(SegmentKind.GAP, "0", 0),
        Origin(SegmentKind.DRIFT, "1", 1),
    ]


@pytest.mark.parametrize("predicted", [None, predicts(1, 2)])
def test_a_rollout_whose_first_tokens_are_missing_begins_with_what_is_reported(predicted: object) -> None:
    ledger = Ledger()
    ledger.main.gap = True
    assert ledger.main.gap is True
    assert ledger.main.commit(Turn(2, ids(30), None, predicted, ids(1, 9, 10, 20))) is None  # type: ignore[arg-type]
    assert ledger.segments[0].origin == Origin(SegmentKind.MAIN)
    assert spans_of(ledger) == [("prompt", 2, 0, 4), ("model", 2, 4, 5)]
    assert ledger.main.gap is False


@pytest.mark.parametrize("predicted", [None, predicts(20)])
def test_a_prediction_alone_cannot_close_a_gap(predicted: object) -> None:
    for ledger in (interrupted(), Ledger()):
        ledger.main.gap = True
        before = shown_ledger(ledger)
        with pytest.raises(ValueError, match="after a gap the trainer must report its prompt"):
            ledger.main.commit(Turn(3, ids(30), None, predicted))  # type: ignore[arg-type]
        assert shown_ledger(ledger) == before
        assert ledger.main.gap is True, "the next turn has the same prefix"


def test_a_turn_that_is_refused_for_its_logprobs_leaves_the_gap_open() -> None:
    ledger = interrupted()
    with pytest.raises(ValueError, match="numbers of logprobs and of tokens differ"):
        ledger.main.commit(Turn(3, ids(30), pack_logprobs(), None, ids(7)))
    assert ledger.main.gap is True
