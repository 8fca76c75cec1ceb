"""Law 5 of the machine: the same records give the same outcome, and an inconsistent log is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
from rollout_server.core.conversation import State
from rollout_server.core.ledger import Drift, DriftKind, Origin, SegmentKind
from rollout_server.core.machine import IllegalRecord, Machine, replay
from rollout_server.core.message import ToolCall
from rollout_server.core.outcome import RewardResult, Stop
from rollout_server.core.record import (
    Accepted,
    Answered,
    Appended,
    Asked,
    DriftFound,
    Ended,
    Input,
    Note,
    Record,
    SegmentOpened,
    ToolReturned,
    ToolStarted,
)

from tests.support.machine_records import RESULT, USER, answered, fresh, ids, predicts, shown_outcome

CALLS = (ToolCall("a", "add", "{}"), ToolCall("b", "add", "{}"))
INPUTS: tuple[Input, ...] = (
    Accepted(2, "calculator", "1"),
    Asked(1, "0", "u/0/1", 2),
    answered(1, 7, 8, reported=ids(5)),
    ToolStarted(1, 0, CALLS[0]),
    ToolStarted(1, 1, CALLS[1]),
    ToolReturned(1, 1, CALLS[1], RESULT, True, 2.0),
    ToolReturned(1, 0, CALLS[0], RESULT, False, 3.0),
    Note(1, "word", "text"),
    Asked(2, "0", "u/0/2", 5),
    answered(2, 9, predicted=predicts(20), reported=ids(5, 7, 30)),
    Appended((USER,)),
    Asked(3, "1", "u/1/3", 7),
    answered(3, 11, predicted=predicts(21), reported=ids(5, 7, 30, 9, 22)),
    Ended(Stop("stop"), RewardResult(1.0)),
)


def play() -> tuple[Machine, list[Record]]:
    machine = fresh()
    return machine, [logged for record in INPUTS for logged in machine.accept(record)]


LOG = play()[1]
KINDS = [type(record).__name__ for record in LOG]


def outcome_of(log: list[Record]) -> tuple[object, ...]:
    outcome = replay(fresh(), log).outcome
    assert outcome is not None
    return shown_outcome(outcome)


def assert_refused(log: list[Record]) -> None:
    with pytest.raises(IllegalRecord):
        replay(fresh(), log)


def places(*kinds: str) -> list[int]:
    return [place for place, kind in enumerate(KINDS) if kind in kinds]


def test_the_log_holds_what_followed_right_before_what_it_follows_from() -> None:
    assert KINDS[2:5] == ["DriftFound", "SegmentOpened", "Answered"]
    assert KINDS[11:14] == ["DriftFound", "SegmentOpened", "Answered"]
    assert KINDS[16:] == ["DriftFound", "Answered", "Ended"]


def test_a_log_does_not_repeat_the_prompt_that_a_segment_holds() -> None:
    answers = [record for record in LOG if isinstance(record, Answered)]
    assert [(a.shared, a.reported) for a in answers] == [(0, ids(5)), (0, ids(5, 7, 30)), (4, ids(22))]


def test_a_replayed_log_gives_the_same_outcome() -> None:
    machine, log = play()
    assert machine.outcome is not None
    assert outcome_of(log) == shown_outcome(machine.outcome)


def test_replay_returns_the_machine_it_was_given_also_amid_a_rollout() -> None:
    machine = fresh()
    assert replay(machine, LOG[:8]) is machine
    assert (machine.state, machine.turn, machine.outcome) == (State.CALLING, 1, None)


def test_a_rollout_goes_on_after_a_replay_of_its_beginning() -> None:
    for place in range(len(LOG)):
        if KINDS[place - 1 if place else 0] in ("DriftFound", "SegmentOpened"):
            continue
        machine = replay(replay(fresh(), LOG[:place]), LOG[place:])
        assert machine.outcome is not None
        assert shown_outcome(machine.outcome) == outcome_of(LOG)


def test_the_order_in_which_parallel_calls_return_does_not_matter() -> None:
    returns = places("ToolReturned")
    for order in permutations(returns):
        log = [LOG[order[returns.index(i)]] if i in returns else record for i, record in enumerate(LOG)]
        assert outcome_of(log) == outcome_of(LOG)


@pytest.mark.parametrize("place", [i for i in range(len(LOG) - 1) if KINDS[i] not in ("Accepted", "Note")])
def test_a_log_with_a_record_missing_is_refused(place: int) -> None:
    assert_refused([*LOG[:place], *LOG[place + 1 :]])


@pytest.mark.parametrize("place", [i for i in range(len(LOG)) if KINDS[i] != "Note"])
def test_a_log_with_a_record_twice_is_refused(place: int) -> None:
    assert_refused([*LOG[: place + 1], *LOG[place:]])


@pytest.mark.parametrize("place", [i for i in range(len(LOG) - 1) if "Note" not in KINDS[i : i + 2]])
def test_a_log_with_two_neighbours_swapped_is_refused(place: int) -> None:
    swapped = [*LOG[:place], LOG[place + 1], LOG[place], *LOG[place + 2 :]]
    if KINDS[place] == KINDS[place + 1] == "ToolReturned":
        assert outcome_of(swapped) == outcome_of(LOG)
    else:
        assert_refused(swapped)


def changed() -> list[tuple[int, Record]]:
    """Each consequence and each request for a completion, with one field changed."""
    found: list[tuple[int, Record]] = []
    for place, record in enumerate(LOG):
        if isinstance(record, DriftFound):
            other = Drift(DriftKind.TRUNCATED, 0, 0, 0)
            found += [(place, replace(record, turn=9)), (place, replace(record, segment_id="9"))]
            found += [(place, replace(record, drift=other))]
        if isinstance(record, SegmentOpened):
            origin = Origin(SegmentKind.BRANCH, "9", 9)
            found += [(place, replace(record, turn=9)), (place, replace(record, segment_id="9"))]
            found += [(place, replace(record, origin=origin)), (place, replace(record, prompt_tokens=9))]
        if isinstance(record, Asked):
            found += [(place, replace(record, turn=9)), (place, replace(record, segment_id="9"))]
            found += [(place, replace(record, turn_key="u")), (place, replace(record, messages=9))]
    return found


@pytest.mark.parametrize(("place", "record"), changed())
def test_a_log_with_a_field_changed_is_refused(place: int, record: Record) -> None:
    assert_refused([*LOG[:place], record, *LOG[place + 1 :]])


def test_a_log_whose_answer_was_changed_no_longer_agrees_with_what_followed() -> None:
    place = places("Answered")[0]
    answer = LOG[place]
    assert isinstance(answer, Answered)
    assert_refused([*LOG[:place], replace(answer, token_ids=ids(7, 30)), *LOG[place + 1 :]])
    assert_refused([*LOG[:place], replace(answer, reported=ids(100 + 1)), *LOG[place + 1 :]])
    place = places("Answered")[2]
    answer = LOG[place]
    assert isinstance(answer, Answered)
    assert_refused([*LOG[:place], replace(answer, shared=3), *LOG[place + 1 :]])


@pytest.mark.parametrize("place", [i for i in range(len(LOG)) if KINDS[i] not in ("SegmentOpened", "DriftFound")])
def test_a_consequence_that_did_not_follow_is_refused(place: int) -> None:
    invented = DriftFound(1, "0", Drift(DriftKind.ENVIRONMENT, 1, 1, 1))
    assert_refused([*LOG[:place], invented, *LOG[place:]])


@pytest.mark.parametrize("log", [[*LOG, LOG[2]], LOG[:3], LOG[2:3]])
def test_a_consequence_at_the_end_of_a_log_is_refused(log: list[Record]) -> None:
    assert_refused(log)
