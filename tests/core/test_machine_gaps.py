"""The laws of the machine if a trainer sends ids for some turns only: segments, warnings, counts, and replay."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_server.core.ledger import Origin, SegmentKind, pack_logprobs
from rollout_server.core.machine import IllegalRecord, Machine, replay
from rollout_server.core.outcome import Stop, Warned
from rollout_server.core.record import Answered, Ended, Record, SegmentOpened

from tests.support.machine_records import (
    answered,
    asks,
    assert_refused,
    ends,
    fresh,
    ids,
    predicts,
    shown_outcome,
    spans_of,
    takes_turn,
)

STOP = Ended(Stop("stop"))
UNKNOWN = {"predicted": None, "token_ids": None}

# What a trainer without masks may send for a turn: ids and prompt, ids alone, a prompt alone, nothing.
KNOWN, NO_PROMPT, NO_IDS, NOTHING = "known", "no prompt", "no ids", "nothing"
kinds = st.lists(st.sampled_from((KNOWN, NO_PROMPT, NO_IDS, NOTHING)), min_size=1, max_size=8)


def plain_turn(machine: Machine, kind: str) -> tuple[Record, ...]:
    """A turn of a trainer whose prompts extend each other: two tokens per turn, the second of them a completion."""
    turn = machine.turn + 1
    prompt = ids(*range(2 * turn - 1)) if kind in (KNOWN, NO_IDS) else None
    rest: dict[str, object] = {"predicted": None, "reported": prompt, "usage": (70, 7)}
    if kind in (NO_IDS, NOTHING):
        rest["token_ids"] = None
    return takes_turn(machine, 2 * turn - 1, **rest)


def warnings_of(machine: Machine) -> list[tuple[str, int]]:
    return [(warned.code, warned.turn) for warned in ends(machine, STOP).warnings]


def test_a_turn_without_ids_is_in_no_sample_and_the_next_opens_a_segment() -> None:
    machine = fresh()
    takes_turn(machine, 5, 6, predicted=None, reported=ids(1))
    assert len(takes_turn(machine, **UNKNOWN)) == 1
    answer = answered(asks(machine).turn, 9, predicted=None, reported=ids(1, 5, 6, 7, 8, 7))
    assert machine.accept(answer) == (SegmentOpened(3, "1", Origin(SegmentKind.GAP, "0", 3), 6), answer)
    assert [spans_of(machine.ledger, index) for index in (0, 1)] == [
        [("prompt", 1, 0, 1), ("model", 1, 1, 3)],
        [("prompt", 3, 0, 6), ("model", 3, 6, 7)],
    ]
    outcome = ends(machine, STOP)
    assert outcome.warnings == (
        Warned(
            "tokens_unknown",
            "turn 2: the completion came without token_ids, so no training sample contains the turn",
            2,
        ),
    )
    assert outcome.metrics.generated_tokens == 3


def test_a_turn_whose_prompt_is_unknown_is_in_no_sample_either() -> None:
    machine = fresh()
    takes_turn(machine, 5, predicted=None, reported=ids(1))
    assert len(takes_turn(machine, 6, predicted=None)) == 1
    assert len(machine.ledger.segments[0]) == 2
    assert [warned.message for warned in ends(machine, STOP).warnings] == [
        "turn 2: the completion came without prompt_token_ids, so no training sample contains the turn"
    ]


def test_one_gap_is_one_warning_and_the_next_gap_another() -> None:
    machine = fresh()
    for kind in (KNOWN, NOTHING, NO_PROMPT, NO_IDS, KNOWN, KNOWN, NO_PROMPT, NOTHING):
        plain_turn(machine, kind)
    assert warnings_of(machine) == [("tokens_unknown", 2), ("tokens_unknown", 7)]


@pytest.mark.parametrize("kind", [NOTHING, NO_IDS, NO_PROMPT])
def test_a_trainer_that_never_sends_what_is_needed_is_not_warned_of(kind: str) -> None:
    machine = fresh()
    for _ in range(4):
        plain_turn(machine, kind)
    assert machine.ledger.segments == ()
    assert warnings_of(machine) == []


def test_a_trainer_that_always_sends_ids_is_not_warned_of() -> None:
    machine = fresh()
    for _ in range(4):
        plain_turn(machine, KNOWN)
    assert len(machine.ledger.segments) == 1
    assert warnings_of(machine) == []


def test_a_trainer_that_begins_late_is_warned_of_once_in_its_first_turn_with_ids() -> None:
    machine = fresh()
    for kind in (NOTHING, NOTHING, KNOWN, KNOWN):
        plain_turn(machine, kind)
    assert machine.ledger.segments[0].origin == Origin(SegmentKind.MAIN)
    assert ends(machine, STOP).warnings == (
        Warned(
            "tokens_unknown",
            "turn 3: the completions before this turn had no token ids; they are part of its masked prompt",
            3,
        ),
    )


def test_a_prediction_cannot_stand_in_for_a_prompt_after_a_gap() -> None:
    """The prediction would start where the unknown turn ended. The turn is not counted, because the ledger lacks it."""
    machine = fresh()
    takes_turn(machine, 5, 6)
    takes_turn(machine, **UNKNOWN)
    assert len(takes_turn(machine, 7, 8, 9, predicted=predicts(30), usage=(40, 4))) == 1
    assert len(machine.ledger.segments) == 1
    assert (machine.metrics.prompt_tokens, machine.metrics.generated_tokens) == (1 + 40, 2 + 3)
    assert machine.metrics.max_context_tokens == 43


def test_without_ids_tokens_are_counted_as_the_trainer_counts_them() -> None:
    machine = fresh()
    plain_turn(machine, KNOWN)
    plain_turn(machine, NOTHING)
    plain_turn(machine, NO_IDS)
    assert (machine.metrics.prompt_tokens, machine.metrics.generated_tokens) == (1 + 70 + 5, 1 + 7 + 7)


def test_an_answer_with_too_few_logprobs_after_a_gap_is_refused_and_leaves_no_trace() -> None:
    for machine in (fresh(), fresh()):
        plain_turn(machine, NOTHING)
        asks(machine)
        misfit = answered(2, 5, predicted=None, reported=ids(1, 2, 3), logprobs=pack_logprobs())
        assert_refused(machine, misfit)
        assert machine.ledger.main.gap is True
        machine.accept(replace(misfit, logprobs=None))
        assert warnings_of(machine) == [("tokens_unknown", 2)], "one warning, for the accepted completion"


def test_a_prompt_after_a_gap_is_logged_whole() -> None:
    machine = fresh()
    plain_turn(machine, KNOWN)
    plain_turn(machine, NOTHING)
    _, logged = plain_turn(machine, KNOWN)
    assert isinstance(logged, Answered)
    assert (logged.shared, logged.reported) == (0, ids(0, 1, 2, 3, 4))
    (following,) = plain_turn(machine, KNOWN)
    assert isinstance(following, Answered)
    assert (following.shared, following.reported) == (6, ids(6))


def test_a_prompt_after_a_gap_may_be_told_without_what_the_segment_holds() -> None:
    machine = fresh()
    plain_turn(machine, KNOWN)
    plain_turn(machine, NOTHING)
    opened, logged = takes_turn(machine, 9, predicted=None, reported=ids(8), shared=1)
    assert opened == SegmentOpened(3, "1", Origin(SegmentKind.GAP, "0", 1), 2)
    assert isinstance(logged, Answered)
    assert (logged.shared, logged.reported) == (1, ids(8))
    assert machine.ledger.segments[1].ids() == ids(0, 8, 9)


@given(kinds)
def test_the_ledger_of_a_plain_trainer_holds_the_known_turns_and_says_where_others_are_missing(
    sent: list[str],
) -> None:
    machine = fresh()
    for kind in sent:
        plain_turn(machine, kind)
    known = [turn for turn, kind in enumerate(sent, start=1) if kind == KNOWN]
    begins = [turn for turn in known if turn - 1 not in known]
    segments = machine.ledger.segments
    assert [segment.spans[0].turn for segment in segments] == begins
    assert [span.turn for segment in segments for span in segment.spans if span.trains] == known
    trained = [
        i for s in segments for i, bit in zip(s.sample().response_ids, s.sample().response_mask, strict=True) if bit
    ]
    assert trained == [2 * turn - 1 for turn in known], "each known generated token is trained once, and no other token"
    assert [segment.origin.kind for segment in segments[1:]] == [SegmentKind.GAP] * (len(begins) - 1)
    ends_of_runs = [turn + 1 for turn in known if turn + 1 not in known and turn < len(sent)]
    late = begins[:1] if begins and begins[0] > 1 else []
    assert warnings_of(machine) == [("tokens_unknown", turn) for turn in sorted([*late, *ends_of_runs])]


@given(kinds)
def test_a_log_with_gaps_replays_and_one_that_hides_them_is_refused(sent: list[str]) -> None:
    machine = fresh()
    log: list[Record] = []
    for kind in sent:
        wish = asks(machine)
        turn = wish.turn
        prompt = ids(*range(2 * turn - 1)) if kind in (KNOWN, NO_IDS) else None
        answer = answered(turn, 2 * turn - 1, predicted=None, reported=prompt)
        log += [wish, *machine.accept(replace(answer, token_ids=None) if kind in (NO_IDS, NOTHING) else answer)]
    log += machine.accept(STOP)
    again = replay(fresh(), log)
    assert again.outcome is not None
    assert machine.outcome is not None
    assert shown_outcome(again.outcome) == shown_outcome(machine.outcome)
    for place, record in enumerate(log):
        if isinstance(record, SegmentOpened):
            other = replace(
                record, origin=Origin(SegmentKind.DRIFT, record.origin.parent_id, record.origin.parent_tokens)
            )
            for changed in ([], [other]):
                with pytest.raises(IllegalRecord):
                    replay(fresh(), [*log[:place], *changed, *log[place + 1 :]])
