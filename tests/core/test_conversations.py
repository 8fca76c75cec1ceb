"""Several conversations in one machine: their initial tokens, what is trained where, and what a refusal leaves unchanged."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rollout_server.core.conversation import Conversation, State
from rollout_server.core.ledger import DriftKind, MaskReason, Origin, Role, SegmentKind
from rollout_server.core.machine import IllegalRecord, LimitReached, Machine, replay
from rollout_server.core.outcome import Stop
from rollout_server.core.record import (
    Appended,
    Asked,
    DriftFound,
    Ended,
    Forked,
    GivenUp,
    Masked,
    Note,
    Observed,
    Record,
    Rewarded,
    SegmentOpened,
)

from tests.support.machine_records import (
    CALL,
    USER,
    answered,
    assert_refused,
    ends,
    fresh,
    ids,
    predicts,
    shown_outcome,
    starts,
    takes_turn,
)

BRANCH, SUBAGENT, COMPACTION = SegmentKind.BRANCH, SegmentKind.SUBAGENT, SegmentKind.COMPACTION


def forks(machine: Machine, kind: SegmentKind, of: Conversation | None = None) -> Conversation:
    record = machine.fork(kind, () if kind is BRANCH else (USER,), of)
    machine.accept(record)
    return machine.find(record)


def asks(machine: Machine, of: Conversation) -> int:
    wish = machine.request_completion(of)
    assert isinstance(wish, Asked)
    machine.accept(wish)
    return wish.turn


def begun() -> Machine:
    """A machine after one turn: prompt 101, completion 7 8."""
    machine = fresh()
    takes_turn(machine, 7, 8)
    return machine


def test_a_branch_begins_with_what_was_held_and_trains_none_of_it() -> None:
    machine = begun()
    branch = forks(machine, BRANCH)
    turn = asks(machine, branch)
    opened, _ = machine.accept(answered(turn, 9, predicted=predicts(20, closing=[5])))
    assert opened == SegmentOpened(2, "1", Origin(BRANCH, "0", 3), 5)
    sample = machine.ledger.segments[1].sample()
    assert (list(sample.prompt_ids), list(sample.response_ids), sample.response_mask) == (
        [101, 7, 8, 5, 20],
        [9],
        b"\x01",
    )


def test_the_parent_goes_on_and_neither_sees_the_other() -> None:
    machine = begun()
    branch = forks(machine, BRANCH)
    first, second = asks(machine, machine.main), asks(machine, branch)
    machine.accept(answered(second, 30, predicted=predicts(20)))
    machine.accept(answered(first, 40, predicted=predicts(21)))
    assert [list(s.ids()) for s in machine.ledger.segments] == [[101, 7, 8, 21, 40], [101, 7, 8, 20, 30]]
    assert [m.text for m in machine.main.messages[:-1]] == [m.text for m in branch.messages[:-1]]


def test_a_branch_of_a_branch_that_never_asked_has_the_first_ones_parent_and_messages() -> None:
    machine = begun()
    first = forks(machine, BRANCH)
    machine.accept(Appended((USER,), first.id))
    takes_turn(machine, 50)
    second = forks(machine, BRANCH, first)
    assert second.line.origin == Origin(BRANCH, "0", 3)
    assert (list(second.line.prefix()), len(second.messages)) == ([101, 7, 8], len(machine.main.messages))


@pytest.mark.parametrize(
    ("reported", "kind", "index"),
    [
        ((101, 7, 8, 21), DriftKind.ENVIRONMENT, 3),
        ((101, 7), DriftKind.TRUNCATED, 2),
        ((101, 9, 8, 20), DriftKind.RETOKENISED, 1),
        ((1, 7, 8, 20), DriftKind.HISTORY_REWRITTEN, 0),
    ],
)
def test_a_branch_whose_prompt_is_another_is_drift_and_stays_a_branch(
    reported: tuple[int, ...], kind: DriftKind, index: int
) -> None:
    machine = begun()
    branch = forks(machine, BRANCH)
    turn = asks(machine, branch)
    found, opened, _ = machine.accept(answered(turn, 9, predicted=predicts(20), reported=ids(*reported)))
    assert isinstance(found, DriftFound)
    assert (found.drift.kind, found.drift.index, found.segment_id) == (kind, index, "1")
    assert opened == SegmentOpened(2, "1", Origin(BRANCH, "0", min(index, 3)), len(reported))
    assert list(machine.ledger.segments[1].sample().prompt_ids) == list(reported)


def test_a_reported_branch_is_logged_without_what_was_held() -> None:
    machine = begun()
    branch = forks(machine, BRANCH)
    turn = asks(machine, branch)
    *_, logged = machine.accept(answered(turn, 9, predicted=predicts(20), reported=ids(101, 7, 8, 20)))
    assert logged == answered(turn, 9, predicted=predicts(20), reported=ids(20), shared=3)


@pytest.mark.parametrize("kind", [SUBAGENT, COMPACTION])
def test_a_conversation_of_its_own_shares_no_tokens(kind: SegmentKind) -> None:
    machine = begun()
    other = forks(machine, kind)
    takes = answered(asks(machine, other), 9, predicted=predicts(101, 7))
    assert machine.accept(takes)[0] == SegmentOpened(2, "1", Origin(kind, "0", 0), 2)


def test_the_outcome_has_the_messages_of_the_last_compaction() -> None:
    machine = begun()
    apart = forks(machine, SUBAGENT)
    first = forks(machine, COMPACTION)
    assert (machine.main, machine.main.last_completion) == (first, None)
    second = forks(machine, COMPACTION, first)
    shorter = forks(machine, COMPACTION, apart)
    assert machine.main is second
    assert [each.state for each in (first, second, apart, shorter)] == [
        State.CLOSED,
        State.OPEN,
        State.CLOSED,
        State.OPEN,
    ]
    machine.accept(answered(asks(machine, second), 9, finish_reason="length"))
    assert machine.natural_stop() == Stop("stop", truncated=True)
    assert ends(machine, Ended(Stop("stop"))).messages == tuple(second.messages)


def test_one_open_turn_for_each_conversation() -> None:
    machine = begun()
    branch = forks(machine, BRANCH)
    asks(machine, branch)
    assert_refused(machine, Asked(3, branch.id, f"u/{branch.id}/3", len(branch.messages)))
    assert asks(machine, machine.main) == 3


def test_a_conversation_that_was_given_up_takes_nothing_more_and_harms_no_other() -> None:
    machine = begun()
    branch = forks(machine, BRANCH)
    turn = asks(machine, branch)
    machine.accept(Note(turn, "resampled", "asked twice"))
    machine.accept(GivenUp(turn, branch.id))
    for record in (
        answered(turn, 9),
        Appended((USER,), branch.id),
        machine.request_completion(branch),
        machine.fork(BRANCH, (), branch),
    ):
        assert_refused(machine, record)
    takes_turn(machine, 10)
    outcome = ends(machine, Ended(Stop("stop")))
    assert [(warned.code, warned.turn) for warned in outcome.warnings] == [("resampled", 2)]
    assert (outcome.metrics.turns, len(outcome.segments)) == (2, 1)


def test_limits_count_all_conversations() -> None:
    machine = fresh(replace(fresh().limits, turns=2, tool_turns=1))
    takes_turn(machine, 7)
    branch = forks(machine, BRANCH)
    starts(machine, CALL)
    assert machine.start_calls([CALL], branch) == LimitReached(Stop("max_turns"))
    asks(machine, branch)
    assert machine.request_completion() == LimitReached(Stop("max_turns"))


def test_a_masked_answer_keeps_its_author_and_trains_no_more() -> None:
    machine = begun()
    takes_turn(machine, 9)
    before = machine.ledger.segments[0].ids()
    assert_refused(machine, Masked(3, "there is no such turn"))
    machine.accept(Masked(1, "dull"))
    machine.accept(Masked(1, "twice is once"))
    segment = machine.ledger.segments[0]
    assert [(span.turn, span.reason) for span in segment.spans] == [
        (1, MaskReason.PROMPT),
        (1, MaskReason.AUTHOR),
        (2, MaskReason.ENVIRONMENT),
        (2, None),
    ]
    assert (segment.ids(), segment.sample().response_mask) == (before, b"\x00\x00\x00\x01")


def test_an_answer_cannot_be_masked_before_it_is_there() -> None:
    machine = begun()
    asks(machine, machine.main)
    assert_refused(machine, Masked(2, "dull"))


WRONG = [
    Forked("2", "0", Origin(BRANCH, "0", 3), 3),
    Forked("1", "9", Origin(BRANCH, "0", 3), 3),
    Forked("1", "0", Origin(BRANCH, "0", 2), 3),
    Forked("1", "0", Origin(BRANCH, "0", 3), 2),
    Forked("1", "0", Origin(BRANCH, "0", 3), 3, (USER,)),
    Forked("1", "0", Origin(SUBAGENT, "0"), 0),
    Forked("1", "0", Origin(SUBAGENT, "1"), 1, (USER,)),
    Forked("1", "0", Origin(SUBAGENT, "0", 1), 1, (USER,)),
    Forked("1", "0", Origin(SegmentKind.DRIFT, "0", 0), 1, (USER,)),
    Forked("1", "0", Origin(COMPACTION, "0"), 1, (USER,), role=Role("critic")),
    Forked("1", "0", Origin(COMPACTION, "0"), 1, (USER,), role=Role(trainable=False)),
    Forked("1", "0", Origin(COMPACTION, "0"), 1, (USER,), role=Role(model="critic")),
    Forked("1", "0", Origin(BRANCH, "0", 3), 3, role=Role(model="critic")),
]


@pytest.mark.parametrize("record", WRONG)
def test_a_fork_with_one_thing_wrong_is_refused(record: Forked) -> None:
    assert_refused(begun(), record)


def test_several_conversations_are_replayed() -> None:
    machine, log = fresh(), list[Record]()

    def take(record: object) -> None:
        log.extend(machine.accept(record))  # type: ignore[arg-type]

    take(machine.request_completion())
    take(answered(1, 7, 8))
    take(machine.fork(BRANCH))
    take(machine.fork(SUBAGENT, (USER,)))
    branch, other = (machine.find(Appended((), name)) for name in ("1", "2"))
    take(machine.request_completion(branch))
    take(machine.request_completion(other))
    take(machine.request_completion())
    take(answered(3, 9, reported=ids(5)))
    take(answered(2, 10, reported=ids(101, 7, 8, 20)))
    take(answered(4, 11, reported=ids(6)))
    take(Masked(3, "dull"))
    take(machine.fork(COMPACTION, (USER,)))
    take(Ended(Stop("stop")))
    again = replay(fresh(), log)
    assert machine.outcome is not None
    assert again.outcome is not None
    assert shown_outcome(again.outcome) == shown_outcome(machine.outcome)
    assert [segment.id for segment in machine.ledger.segments] == ["0", "2", "1", "3"]


CRITIC = Role("critic", trainable=False)


def test_all_segments_of_a_conversation_have_its_role() -> None:
    machine = begun()
    record = machine.fork(SUBAGENT, (USER,), role=CRITIC)
    machine.accept(record)
    critic = machine.find(record)
    # The second prompt drifts, the third turn has no ids, so a gap follows.
    for prompt in ((1, 2), (1, 3), None, (1, 4)):
        turn = asks(machine, critic)
        given = answered(turn, 7, reported=None if prompt is None else ids(*prompt))
        machine.accept(given if prompt is not None else replace(given, token_ids=None))
    shorter = forks(machine, COMPACTION, critic)
    machine.accept(answered(asks(machine, shorter), 8))
    branch = forks(machine, BRANCH, shorter)
    machine.accept(answered(asks(machine, branch), 9))
    found = {segment.id: (segment.origin.kind.value, segment.role) for segment in machine.ledger.segments}
    assert list(found.values()) == [
        ("main", Role()),
        ("subagent", CRITIC),
        ("drift", CRITIC),
        ("gap", CRITIC),
        ("compaction", CRITIC),
        ("branch", Role()),
    ]


def test_a_branch_and_a_compaction_keep_the_further_model() -> None:
    machine = begun()
    record = machine.fork(SUBAGENT, (USER,), role=Role("critic", trainable=True, model="large"))
    machine.accept(record)
    critic = machine.find(record)
    machine.accept(answered(asks(machine, critic), 7))
    branch = machine.fork(BRANCH, (), critic, Role("other"))
    assert branch.role == Role("other", model="large")
    with pytest.raises(IllegalRecord):
        machine.accept(replace(branch, role=Role("other")))
    machine.accept(branch)
    assert machine.find(branch).role.model == "large"
    shorter = forks(machine, COMPACTION, critic)
    machine.accept(answered(asks(machine, shorter), 8))
    assert [segment.role.model for segment in machine.ledger.segments] == ["", "large", "large"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1.1e9, -1.1e9])
def test_a_turn_reward_is_a_number_of_bounded_size(value: float) -> None:
    assert_refused(begun(), Rewarded(1, value))


def test_a_turn_has_a_bounded_number_of_rewards_which_add_up() -> None:
    machine = begun()
    for _ in range(1000):
        machine.accept(Rewarded(1, 0.1))
    assert_refused(machine, Rewarded(1, 0.1))
    takes_turn(machine, 9)
    machine.accept(Rewarded(2, 1e9))
    turns = ends(machine, Ended(Stop("stop"))).turn_rewards
    assert [(each.turn, each.value, each.segment_id) for each in turns] == [(1, 100.0, "0"), (2, 1e9, "0")]


def test_what_names_no_conversation_belongs_to_the_main_one() -> None:
    machine = begun()
    forks(machine, COMPACTION)
    assert machine.find(Ended(Stop("stop"))) is machine.main is not machine.of_turn(1)


def test_a_conversation_that_asked_for_nothing() -> None:
    machine = begun()
    assert (machine.main.turn_messages, forks(machine, SUBAGENT).turn_messages, fresh().main.turn_messages) == (2, 0, 0)


def test_what_was_observed_takes_its_place() -> None:
    machine = begun()
    before = machine.size
    machine.accept(Observed("once", '"abcdef"'))
    assert machine.size == before + 8
