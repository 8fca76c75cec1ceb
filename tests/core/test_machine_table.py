"""Law 1 of the machine: an intent accepts its own result or an end. Anything else raises and changes nothing.

The test takes one small rollout with every kind of record, cuts its log at each position, and tries every kind of record
there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from rollout_server.core import record as records
from rollout_server.core.capture.report import CaptureReport
from rollout_server.core.conversation import State
from rollout_server.core.ledger import Drift, DriftKind, Origin, Parting, SegmentKind, pack_logprobs
from rollout_server.core.machine import IllegalRecord, Machine
from rollout_server.core.message import Message, ToolCall
from rollout_server.core.outcome import Stop
from rollout_server.core.record import (
    Accepted,
    Appended,
    Asked,
    CaptureSettled,
    DriftFound,
    Ended,
    GivenUp,
    Input,
    Masked,
    ModelCalled,
    Note,
    Observed,
    Record,
    Resumed,
    Rewarded,
    SegmentOpened,
    ToolReturned,
    ToolStarted,
)

from tests.support.machine_records import CALL, RESULT, USER, answered, assert_refused, fresh, ids, shown, shown_outcome

OTHER_CALL = ToolCall("b", "add", "{}")
OTHER_RESULT = Message.write({"role": "tool", "content": "9", "tool_call_id": "b"})

ROLLOUT: tuple[Input, ...] = (
    Accepted(2, "calculator", "1"),
    Asked(1, "0", "u/0/1", 2),
    answered(1, 7, 8),
    ToolStarted(1, 0, CALL),
    ToolStarted(1, 1, OTHER_CALL),
    ToolReturned(1, 1, OTHER_CALL, OTHER_RESULT, True, 2.0),
    ToolReturned(1, 0, CALL, RESULT, False, 3.0),
    Asked(2, "0", "u/0/2", 5),
    answered(2, 9),
    Ended(Stop("stop")),
)

# Columns: the number of records accepted so far. x is legal, . is illegal.
TABLE = """
                  0 1 2 3 4 5 6 7 8 9 10
Accepted          x . . . . . . . . . .
Asked             x x . x . . . x . x .
Answered          . . x . . . . . x . .
Appended          x x . x . . . x . x .
ToolStarted       x x . x x x x x . x .
ToolReturned      . . . . x x x . . . .
Forked            x x x x x x x x x x .
Branched          x x . x . . . x . x .
Compacted         x x . x . . . x . x .
BranchedEarlier   . . . x x x x x x x .
Begun             x x . . . . . . . . .
Parted            x x x x x x x x x x .
GivenUp           . . x . . . . . x . .
Observed          x x x x x x x x x x .
ModelCalled       x x x x x x x x x x .
Masked            . . . x x x x x x x .
Rewarded          . . . x x x x x x x .
CaptureSettled    x x x x x x x x x x .
Note              x x x x x x x x x x .
Resumed           . x x x x x x x x x .
Ended             x x x x x x x x x x .
SegmentOpened     . . . . . . . . . . .
DriftFound        . . . . . . . . . . .
"""
STATES = ["OPEN", "OPEN", "ASKING", "OPEN", "CALLING", "CALLING", "CALLING", "OPEN", "ASKING", "OPEN", "ENDED"]

# Further rows for the same kind of record.
FORKS = dict.fromkeys(("Branched", "Compacted", "BranchedEarlier", "Begun", "Parted"), "Forked")

# The index of the next call in its turn, by cut.
NEXT_INDEX = {4: 1, 5: 2, 6: 2, 7: 2}


def cut(at: int) -> Machine:
    """A machine that has accepted the first records of the rollout."""
    machine = fresh()
    for record in ROLLOUT[:at]:
        machine.accept(record)
    return machine


def _asked(machine: Machine, at: int) -> Record:
    wish = machine.request_completion()
    assert isinstance(wish, Asked)
    return wish


# For each kind, a record whose fields all fit the position; only the kind may be illegal.
FITTING: dict[str, Callable[[Machine, int], Record]] = {
    "Accepted": lambda machine, at: ROLLOUT[0],
    "Asked": _asked,
    "Answered": lambda machine, at: answered(machine.turn, 5),
    "Appended": lambda machine, at: Appended((USER,)),
    "ToolStarted": lambda machine, at: ToolStarted(machine.turn, NEXT_INDEX.get(at, 0), CALL),
    "ToolReturned": lambda machine, at: ToolReturned(machine.turn, 0, CALL, RESULT, False),
    "Forked": lambda machine, at: machine.fork(SegmentKind.SUBAGENT, (USER,)),
    "Branched": lambda machine, at: machine.fork(SegmentKind.BRANCH),
    "Compacted": lambda machine, at: machine.fork(SegmentKind.COMPACTION, (USER,)),
    "BranchedEarlier": lambda machine, at: machine.fork(SegmentKind.BRANCH, after_turn=1),
    "Begun": lambda machine, at: machine.fork(SegmentKind.MAIN, (USER,)),
    "Parted": lambda machine, at: machine.fork(SegmentKind.DRIFT, (USER,), parting=Parting(1, "content")),
    "GivenUp": lambda machine, at: GivenUp(machine.turn, "0"),
    "Observed": lambda machine, at: Observed("now", "1"),
    "ModelCalled": lambda machine, at: ModelCalled("judge", USER),
    "Masked": lambda machine, at: Masked(1, "dull"),
    "Rewarded": lambda machine, at: Rewarded(1, 0.5),
    "CaptureSettled": lambda machine, at: CaptureSettled("0", CaptureReport(continued=1)),
    "Note": lambda machine, at: Note(machine.turn, "word", "text"),
    "Resumed": lambda machine, at: Resumed(1),
    "Ended": lambda machine, at: ROLLOUT[-1],
    "SegmentOpened": lambda machine, at: SegmentOpened(machine.turn, "0", Origin(SegmentKind.MAIN), 1),
    "DriftFound": lambda machine, at: DriftFound(machine.turn, "0", Drift(DriftKind.PROMPT, 0, 1, 1)),
}


def cells() -> Iterator[object]:
    for line in TABLE.strip().splitlines()[1:]:
        kind, *row = line.split()
        for at, mark in enumerate(row):
            yield pytest.param(kind, at, mark == "x", id=f"{kind}-{at}")


def assert_goes_on(machine: Machine, at: int) -> None:
    """Assert that the rest of the rollout is accepted as if nothing had been tried."""
    for record in ROLLOUT[at:]:
        machine.accept(record)
    assert machine.outcome is not None
    untouched = cut(len(ROLLOUT)).outcome
    assert untouched is not None
    assert shown_outcome(machine.outcome) == shown_outcome(untouched)


@pytest.mark.parametrize(("kind", "at", "legal"), list(cells()))
def test_every_record_at_every_place(kind: str, at: int, legal: bool) -> None:
    machine = cut(at)
    record = FITTING[kind](machine, at)
    assert type(record).__name__ == FORKS.get(kind, kind)
    if legal:
        assert machine.accept(record)[-1] is record  # type: ignore[arg-type]
    else:
        assert_refused(machine, record)
        assert_goes_on(machine, at)


def test_the_table_is_whole() -> None:
    """The table covers every kind of record, every cut and every state."""
    rows = {line.split()[0] for line in TABLE.strip().splitlines()[1:]}
    assert rows == set(FITTING)
    assert {FORKS.get(row, row) for row in rows} == {kind.__name__ for kind in _arms("Record")}
    assert [cut(at).state.name for at in range(len(ROLLOUT) + 1)] == STATES
    assert {*STATES, "CLOSED"} == {state.name for state in State}  # test_conversations.py closes some


def _arms(alias: str) -> Iterator[type]:
    """The classes of a union that is written as text."""
    for name in alias.split(" | "):
        found = getattr(records, name)
        if isinstance(found, str):
            yield from _arms(found)
        else:
            yield found


# The next record at a cut, with one invalid field.
MISFITS: list[tuple[int, str, object]] = [
    (1, "turn", 0),
    (1, "turn", 2),
    (1, "segment_id", "1"),
    (1, "turn_key", "u/0/2"),
    (1, "messages", 1),
    (1, "messages", 3),
    (2, "turn", 0),
    (2, "turn", 2),
    (3, "turn", 0),
    (3, "turn", 2),
    (3, "index", 1),
    (3, "index", -1),
    (4, "turn", 0),
    (4, "turn", 2),
    (4, "index", 0),
    (4, "index", 2),
    (5, "turn", 0),
    (5, "turn", 2),
    (5, "index", 2),
    (5, "index", -1),
    (5, "call", CALL),
    (6, "turn", 0),
    (6, "turn", 2),
    (6, "index", 1),
    (6, "index", 2),
    (6, "call", OTHER_CALL),
    (7, "turn", 1),
    (7, "turn", 3),
    (7, "turn_key", "u/0/1"),
    (7, "messages", 4),
    (8, "turn", 1),
    (8, "turn", 3),
]


@pytest.mark.parametrize(("at", "name", "value"), MISFITS)
def test_a_record_with_one_field_wrong_is_refused_and_forgotten(at: int, name: str, value: object) -> None:
    machine = cut(at)
    assert_refused(machine, replace(ROLLOUT[at], **{name: value}))  # type: ignore[arg-type]
    assert_goes_on(machine, at)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_an_answer_that_the_ledger_refuses_is_an_illegal_record(count: int) -> None:
    machine = cut(2)
    assert_refused(machine, answered(1, 7, 8, logprobs=pack_logprobs([-1.0] * count)))
    assert_goes_on(machine, 2)


@pytest.mark.parametrize(("at", "shared"), [(2, 1), (8, 4), (8, -1)])
def test_an_answer_cannot_share_more_with_the_segment_than_there_is(at: int, shared: int) -> None:
    machine = cut(at)
    assert_refused(machine, answered(machine.turn, 9, reported=ids(1), shared=shared))
    assert_goes_on(machine, at)


def test_a_refusal_says_which_record_and_where() -> None:
    with pytest.raises(IllegalRecord, match=r"Answered\(turn=1.* in state open, turn 1"):
        cut(3).accept(answered(1, 5))
    with pytest.raises(IllegalRecord, match="Note after the end"):
        cut(10).accept(Note(1, "word", "text"))


def test_places_look_different() -> None:
    """The views that the table compares differ between positions, so they can reveal a change."""
    looks = [shown(cut(at)) for at in (1, 2, 3, 4, 7, 8, 9, 10)]
    assert all(a != b for a, b in pairwise(looks))
