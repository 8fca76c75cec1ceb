"""Conversations that an agent with a loop of its own opens: after earlier turns, at any time, and without disturbing any other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rollout_server.core.capture.report import CaptureReport
from rollout_server.core.conversation import Conversation, State
from rollout_server.core.ledger import Ledger, MaskReason, Origin, Parting, Role, SegmentKind, Turn
from rollout_server.core.machine import Machine, replay
from rollout_server.core.outcome import Stop, longest_share
from rollout_server.core.record import (
    Appended,
    Asked,
    CaptureSettled,
    Ended,
    Forked,
    GivenUp,
    Input,
    Record,
    SegmentOpened,
)

from tests.support.machine_records import (
    CALL,
    SYSTEM,
    USER,
    answered,
    assert_refused,
    begun,
    ends,
    fresh,
    ids,
    predicts,
    shown_outcome,
    starts,
    takes_turn,
)

MAIN, BRANCH, SUBAGENT = SegmentKind.MAIN, SegmentKind.BRANCH, SegmentKind.SUBAGENT
COMPACTION, DRIFT = SegmentKind.COMPACTION, SegmentKind.DRIFT
PARTED = Parting(2, "content", "8", "nine", "chat", "a1")


def opens(machine: Machine, record: Forked) -> Conversation:
    machine.accept(record)
    return machine.find(record)


def asks(machine: Machine, of: Conversation) -> int:
    wish = machine.request_completion(of)
    assert isinstance(wish, Asked)
    machine.accept(wish)
    return wish.turn


def three_turns() -> Machine:
    """A machine after three turns: 101 | 7 8 | 102 | 9 | 103 | 10."""
    machine = fresh()
    for answer in ((7, 8), (9,), (10,)):
        machine.accept(Appended((USER,)))
        takes_turn(machine, *answer)
    return machine


def spans(machine: Machine, segment: int) -> list[tuple[str, int, int]]:
    found = machine.ledger.segments[segment].spans
    return [(span.reason.value if span.reason else "model", span.start, span.stop) for span in found]


@pytest.mark.parametrize(("turn", "held"), [(1, [101, 7, 8]), (2, [101, 7, 8, 102, 9])])
def test_a_branch_after_an_earlier_turn_has_what_was_held_there(turn: int, held: list[int]) -> None:
    machine = three_turns()
    end = machine.main.ends[turn]
    branch = opens(machine, machine.fork(BRANCH, after_turn=turn, parting=PARTED))
    assert (list(branch.line.prefix()), branch.line.authorship()[-1].stop) == (held, len(held))
    assert branch.messages == machine.main.messages[: end.messages]
    assert (branch.turn, branch.turn_messages, branch.last_completion) == (turn, end.messages - 1, end.completion)
    number = asks(machine, branch)
    opened, logged = machine.accept(answered(number, 20, reported=ids(*held, 104), predicted=predicts(104)))
    origin = Origin(BRANCH, "0", len(held), PARTED)
    assert opened == SegmentOpened(4, "1", origin, len(held) + 1)
    assert (logged.shared, logged.reported) == (len(held), ids(104))  # type: ignore[union-attr]
    assert spans(machine, 1) == [("prompt", 0, len(held) + 1), ("model", len(held) + 1, len(held) + 2)]
    assert machine.ledger.segments[1].origin == origin


def test_a_branch_keeps_the_authors_of_what_it_shares() -> None:
    machine = three_turns()
    branch = opens(machine, machine.fork(BRANCH, after_turn=2))
    machine.accept(answered(asks(machine, branch), 20))
    assert [span.author for span in branch.line.authorship()] == [
        span.author for span in (*machine.ledger.segments[0].spans[:4], *branch.line.authorship()[4:])
    ]


def test_an_earlier_turn_is_continued_whatever_the_conversation_does() -> None:
    machine = three_turns()
    starts(machine, CALL)
    calling = opens(machine, machine.fork(BRANCH, after_turn=3))
    machine = three_turns()
    asks(machine, machine.main)
    asking = opens(machine, machine.fork(BRANCH, after_turn=3))
    machine.accept(GivenUp(4, "0"))
    closed = opens(machine, machine.fork(BRANCH, after_turn=1))
    assert (machine.main.state, closed.state) == (State.CLOSED, State.OPEN)
    assert [len(each.messages) for each in (calling, asking, closed)] == [8, 8, 4]
    assert_refused(machine, machine.fork(BRANCH, after_turn=4))
    assert_refused(machine, machine.fork(BRANCH))


def test_a_branch_of_a_branch_may_begin_in_what_it_shares() -> None:
    machine = three_turns()
    first = opens(machine, machine.fork(BRANCH, after_turn=2))
    early = opens(machine, machine.fork(BRANCH, of=first, after_turn=1))
    assert early.line.origin == Origin(BRANCH, "0", 3)
    machine.accept(answered(asks(machine, first), 20))
    shared = opens(machine, machine.fork(BRANCH, of=first, after_turn=2))
    own = opens(machine, machine.fork(BRANCH, of=first, after_turn=4))
    assert (shared.line.origin, own.line.origin) == (Origin(BRANCH, "0", 5), Origin(BRANCH, "1", 7))
    assert_refused(machine, machine.fork(BRANCH, of=first, after_turn=3))


def test_a_turn_before_a_drift_is_in_the_segment_before_it() -> None:
    machine = three_turns()
    takes_turn(machine, 11, reported=ids(1, 2, 3))
    branch = opens(machine, machine.fork(BRANCH, after_turn=3))
    assert branch.line.origin == Origin(BRANCH, "0", 7)
    machine.accept(answered(asks(machine, branch), 12))
    assert [list(each.ids()) for each in machine.ledger.segments] == [
        [101, 7, 8, 102, 9, 103, 10],
        [1, 2, 3, 11],
        [101, 7, 8, 102, 9, 103, 10, 105, 12],
    ]


def test_a_branch_after_a_turn_without_tokens_begins_with_a_gap_and_one_before_it_does_not() -> None:
    machine = three_turns()
    takes_turn(machine, 11, token_ids=None)
    takes_turn(machine, 12, reported=ids(5, 6))
    after, before = (opens(machine, machine.fork(BRANCH, after_turn=turn)) for turn in (4, 3))
    assert (after.line.gap, before.line.gap, machine.main.line.gap) == (True, False, False)
    machine.accept(answered(asks(machine, after), 13, reported=ids(101, 7, 50)))
    assert machine.ledger.segments[-1].origin == Origin(BRANCH, "0", 2)


def test_a_completion_masked_in_one_conversation_is_masked_and_not_doubled() -> None:
    ledger = begun(answer=(10, 11))
    point = ledger.main.branch_point()
    ledger.main.commit(Turn(2, ids(12), None, predicts(20)))
    branch = ledger.main.branch(Role(), point)
    ledger.segments[0].mask_turn(1)
    branch.commit(Turn(3, ids(13), None, predicts(21)))
    assert [segment.sample().response_mask for segment in ledger.segments] == [b"\0\0\0\1", b"\1"]
    assert ledger.segments[0].spans[1].reason is MaskReason.AUTHOR


@pytest.mark.parametrize("kind", [SUBAGENT, COMPACTION, DRIFT])
@pytest.mark.parametrize("state", ["open", "asking", "closed"])
def test_a_call_that_parts_closes_nothing(kind: SegmentKind, state: str) -> None:
    machine = three_turns()
    if state != "open":
        asks(machine, machine.main)
    if state == "closed":
        machine.accept(GivenUp(4, "0"))
    before = machine.main
    role = Role("helper", trainable=False)
    apart = opens(machine, machine.fork(kind, (SYSTEM, USER), role=role, parting=PARTED))
    assert (machine.main, before.state.value, apart.role, apart.messages) == (before, state, role, [SYSTEM, USER])
    turn = asks(machine, apart)
    machine.accept(answered(turn, 20))
    assert machine.ledger.segments[-1].origin == Origin(kind, "0", 0, PARTED)
    if state == "asking":
        machine.accept(answered(4, 30))
        assert machine.main.last_completion is not None


def test_drift_is_the_trainers_unless_a_call_parted() -> None:
    machine = three_turns()
    assert_refused(machine, machine.fork(DRIFT, (USER,)))
    assert_refused(machine, replace(machine.fork(DRIFT, (USER,), parting=PARTED), messages=(), count=0))
    assert_refused(machine, machine.fork(SegmentKind.GAP, (USER,), parting=PARTED))


def test_the_first_call_replaces_the_prompt_of_the_main_conversation() -> None:
    machine = fresh()
    apart = opens(machine, machine.fork(SUBAGENT, (USER,)))
    machine.accept(answered(asks(machine, apart), 5))
    record = machine.fork(MAIN, (USER,), role=Role("coder"))
    assert (record.segment_id, record.origin, record.count) == ("0", Origin(MAIN), 1)
    assert opens(machine, record) is machine.main
    assert (machine.main.messages, machine.main.role.name) == ([USER], "coder")
    takes_turn(machine, 7)
    assert [(each.id, each.origin, each.role.name) for each in machine.ledger.segments] == [
        ("1", Origin(SUBAGENT, "0"), "agent"),
        ("0", Origin(MAIN), "coder"),
    ]
    assert_refused(machine, machine.fork(MAIN, (USER,)))
    assert ends(machine, Ended(Stop("stop"))).messages[0] == USER


def test_a_first_call_that_failed_is_followed_by_another_first_one() -> None:
    machine = fresh()
    asks(machine, machine.main)
    assert_refused(machine, machine.fork(MAIN, (USER,)))
    machine.accept(GivenUp(1, "0"))
    first = machine.main
    again = opens(machine, machine.fork(MAIN, (USER,)))
    assert (again.id, machine.main, first.state) == ("1", again, State.CLOSED)
    takes_turn(machine, 7)
    assert [(each.id, each.origin) for each in machine.ledger.segments] == [("1", Origin(MAIN))]


def test_after_a_compaction_the_first_call_opens_the_first_segment_anew() -> None:
    machine = fresh()
    shorter = opens(machine, machine.fork(COMPACTION, (USER,)))
    again = opens(machine, machine.fork(MAIN, (SYSTEM, USER)))
    assert (again.id, again.line.origin, machine.main, shorter.state) == ("2", Origin(MAIN), again, State.CLOSED)


@pytest.mark.parametrize(
    "change",
    [
        {"segment_id": "1"},
        {"count": 2},
        {"messages": (), "count": 0},
        {"after_turn": 1},
        {"role": Role(model="large")},
        {"origin": Origin(MAIN, parting=PARTED)},
        {"origin": Origin(MAIN, "0")},
    ],
)
def test_a_first_call_with_one_thing_wrong_is_refused(change: dict[str, object]) -> None:
    machine = fresh()
    assert_refused(machine, replace(machine.fork(MAIN, (USER,)), **change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"after_turn": 0},
        {"after_turn": 2},
        {"after_turn": 9},
        {"after_turn": -1},
        {"count": 9},
        {"messages": (USER,)},
        {"segment_id": "0"},
        {"origin": Origin(BRANCH, "0", 4, PARTED)},
        {"origin": Origin(BRANCH, "1", 3, PARTED)},
        {"origin": Origin(SUBAGENT, "0", 0, PARTED), "messages": (USER,), "count": 1},
    ],
)
def test_a_branch_with_one_thing_wrong_is_refused(change: dict[str, object]) -> None:
    machine = three_turns()
    record = machine.fork(BRANCH, after_turn=1, parting=PARTED)
    assert_refused(machine, replace(record, **change))  # type: ignore[arg-type]


def test_the_settled_conversation_is_the_main_one() -> None:
    machine = three_turns()
    branch = opens(machine, machine.fork(BRANCH, after_turn=1))
    machine.accept(answered(asks(machine, branch), 20, finish_reason="length"))
    report = CaptureReport(continued=2, parted=1)
    assert_refused(machine, CaptureSettled("9", report))
    machine.accept(CaptureSettled(branch.id, report))
    assert_refused(machine, CaptureSettled("0", report))
    assert (machine.main, machine.natural_stop()) == (branch, Stop("stop", truncated=True))
    outcome = ends(machine, Ended(Stop("stop")))
    assert (outcome.messages, outcome.capture) == (tuple(branch.messages), report)


def test_the_share_of_the_longest_segment() -> None:
    assert longest_share(()) == 0
    machine = three_turns()
    branch = opens(machine, machine.fork(BRANCH, after_turn=1))
    machine.accept(answered(asks(machine, branch), 20))
    assert longest_share(machine.ledger.segments) == 0.8
    machine.ledger.segments[0].mask_turn(1)
    assert longest_share(machine.ledger.segments) == pytest.approx(2 / 3)


def test_a_log_of_calls_is_replayed() -> None:
    machine, log = fresh(), list[Record]()

    def take(record: Input) -> None:
        log.extend(machine.accept(record))

    def samples(segment: str, *answer: int, **rest: object) -> None:
        conversation = machine.find(Appended((), segment))
        wish = machine.request_completion(conversation)
        assert isinstance(wish, Asked)
        take(wish)
        take(answered(wish.turn, *answer, **rest))

    take(machine.fork(MAIN, (USER,)))
    samples("0", 7, 8, reported=ids(5))
    samples("0", 9, reported=ids(5, 7, 8, 6))
    take(machine.fork(BRANCH, after_turn=1, parting=PARTED))
    samples("1", 10, reported=ids(5, 7, 8, 4))
    take(machine.fork(COMPACTION, (USER,), of=machine.find(Appended((), "1")), parting=PARTED))
    samples("2", 11)
    take(machine.fork(BRANCH, of=machine.find(Appended((), "1")), after_turn=1))
    samples("3", 12, reported=ids(5, 9))
    take(CaptureSettled("1", CaptureReport(parted=3)))
    take(Ended(Stop("stop")))
    again = replay(fresh(), log)
    assert machine.outcome is not None
    assert again.outcome is not None
    assert shown_outcome(again.outcome) == shown_outcome(machine.outcome)
    assert again.outcome.capture == CaptureReport(parted=3)
    kinds = [segment.origin.kind for segment in machine.ledger.segments]
    assert kinds == [MAIN, BRANCH, COMPACTION, BRANCH]


def test_a_ledger_without_turns_has_a_point() -> None:
    ledger = Ledger()
    branch = ledger.main.branch(point=ledger.main.branch_point())
    assert (branch.origin, list(branch.prefix())) == (Origin(BRANCH, "0", 0), [])
