"""The laws of the machine, case by case: intents, conversation, outcome."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
from rollout_server.core.conversation import State
from rollout_server.core.limits import Limits
from rollout_server.core.machine import LimitReached
from rollout_server.core.message import Message, ToolCall
from rollout_server.core.outcome import Cancellation, Category, End, Failure, RewardResult, Stop, Warned
from rollout_server.core.record import (
    Appended,
    Asked,
    Ended,
    Note,
    ToolReturned,
    ToolStarted,
)

from tests.support.machine_records import (
    ANSWER,
    CALL,
    RESULT,
    SYSTEM,
    USER,
    answered,
    asks,
    assert_refused,
    ends,
    fresh,
    ids,
    returned,
    starts,
    takes_turn,
)

CALLS = tuple(ToolCall(name, "add", "{}") for name in "abc")
RESULTS = tuple(Message.write({"role": "tool", "content": "8", "tool_call_id": call.id}) for call in CALLS)
STOP = Ended(Stop("stop"))


class TestIntents:
    def test_a_completion_is_asked_for_by_turn_segment_and_messages(self) -> None:
        machine = fresh()
        assert asks(machine) == Asked(1, "0", "u/0/1", 2)
        machine.accept(answered(1, 5))
        assert machine.request_completion() == Asked(2, "0", "u/0/2", 3)

    def test_after_drift_the_key_names_the_new_segment(self) -> None:
        machine = fresh()
        takes_turn(machine, 5)
        takes_turn(machine, 6, reported=ids(1, 2))
        assert machine.request_completion() == Asked(3, "1", "u/1/3", 4)

    def test_wishes_change_nothing(self) -> None:
        machine = fresh()
        assert machine.request_completion() == machine.request_completion()
        assert machine.start_calls(CALLS) == machine.start_calls(CALLS)
        assert (machine.state, machine.turn) == (State.OPEN, 0)

    def test_calls_are_numbered_in_their_order(self) -> None:
        machine = fresh()
        takes_turn(machine, 5)
        assert machine.start_calls(iter(CALLS)) == tuple(ToolStarted(1, i, call) for i, call in enumerate(CALLS))
        assert machine.start_calls(()) == ()

    def test_the_newest_answer_is_kept(self) -> None:
        machine = fresh()
        assert machine.main.last_completion is None
        asks(machine)
        answer = answered(1, 5)
        assert machine.accept(answer)[-1] is answer
        assert machine.main.last_completion is answer

    def test_what_is_taken_comes_back_for_the_log(self) -> None:
        machine = fresh()
        asked, note, appended = machine.request_completion(), Note(0, "word", "text"), Appended((USER,))
        assert isinstance(asked, Asked)
        assert machine.accept(note) == (note,)
        assert machine.accept(appended) == (appended,)
        assert machine.accept(wish := asks_again(machine.request_completion())) == (wish,)
        assert machine.accept(STOP) == (STOP,)


def asks_again(wish: Asked | LimitReached) -> Asked:
    assert isinstance(wish, Asked)
    return wish


class TestConversation:
    def test_the_size_is_that_of_messages_and_tokens_each_held_twice(self) -> None:
        machine = fresh()
        texts = sum(len(m.text.encode()) for m in (SYSTEM, USER))
        assert machine.size == 2 * texts
        takes_turn(machine, 5, 6)
        takes_turn(machine, 7, reported=ids(1))
        texts += 2 * len(ANSWER.text.encode())
        assert machine.size == 2 * texts + 16 * (3 + 2)

    def test_messages_grow_in_the_order_of_the_records(self) -> None:
        machine = fresh()
        takes_turn(machine, 5)
        for started in starts(machine, CALL):
            machine.accept(returned(started))
        machine.accept(Appended((USER, SYSTEM)))
        takes_turn(machine, 6)
        assert tuple(machine.messages) == (SYSTEM, USER, ANSWER, RESULT, USER, SYSTEM, ANSWER)

    @pytest.mark.parametrize("order", list(permutations(range(3))))
    def test_results_that_return_in_any_order_keep_the_order_of_the_calls(self, order: tuple[int, ...]) -> None:
        machine = fresh()
        takes_turn(machine, 5)
        started = starts(machine, *CALLS)
        for index in order:
            assert machine.state is State.CALLING
            assert len(machine.messages) == 3
            machine.accept(returned(started[index], RESULTS[index]))
        assert machine.state is State.OPEN
        assert tuple(machine.messages[3:]) == RESULTS

    def test_tools_may_run_again_in_the_same_turn_and_are_counted_on(self) -> None:
        machine = fresh()
        for turn in (1, 2):
            takes_turn(machine, 5)
            for place, call in enumerate(CALLS):
                (started,) = starts(machine, call)
                assert started == ToolStarted(turn, place, call)
                machine.accept(returned(started, RESULTS[place]))
        assert tuple(machine.messages[3:6]) == tuple(machine.messages[7:]) == RESULTS
        assert machine.metrics.tool_calls == 6

    def test_a_call_may_join_those_that_run(self) -> None:
        machine = fresh()
        takes_turn(machine, 5)
        (first,) = starts(machine, CALLS[0])
        late = ToolStarted(1, 1, CALLS[1])
        machine.accept(late)
        machine.accept(returned(first, RESULTS[0]))
        later = ToolStarted(1, 2, CALLS[2])
        machine.accept(later)
        machine.accept(returned(later, RESULTS[2]))
        machine.accept(returned(late, RESULTS[1]))
        assert tuple(machine.messages[3:]) == RESULTS


class TestOutcome:
    def test_there_is_none_before_the_end(self) -> None:
        machine = fresh()
        takes_turn(machine, 5)
        assert machine.outcome is None

    @pytest.mark.parametrize("end", [Stop("max_turns", True), Stop("own word")])
    def test_it_holds_the_end_and_the_verdict_as_they_came(self, end: End) -> None:
        machine = fresh()
        takes_turn(machine, 5)
        verdict = RewardResult(1.0, {"style": 0.5}, "{}")
        outcome = ends(machine, Ended(end, verdict))
        assert outcome.end is end
        assert outcome.reward_result is verdict
        assert machine.state is State.ENDED

    @pytest.mark.parametrize("end", [Failure(Category.TIMEOUT, "late", 1), Cancellation("enough")])
    def test_without_a_stop_there_is_no_reward_and_no_score(self, end: End) -> None:
        machine = fresh()
        takes_turn(machine, 5)
        outcome = ends(machine, Ended(end, RewardResult(0.0, {"style": 0.5}, '{"a": 1}')))
        assert (outcome.end, outcome.reward_result) == (end, RewardResult(None, None, '{"a": 1}'))

    @pytest.mark.parametrize("turns", [0, 2])
    def test_a_failure_knows_its_turn(self, turns: int) -> None:
        machine = fresh()
        for _ in range(turns):
            takes_turn(machine, 5)
        failure = Failure(Category.NETWORK, "no answer", turn=77, http_status=502)
        assert ends(machine, Ended(failure)).end == Failure(Category.NETWORK, "no answer", turns, 502)

    def test_a_failure_while_asking_belongs_to_the_turn_that_was_asked_for(self) -> None:
        machine = fresh()
        asks(machine)
        assert ends(machine, Ended(Failure(Category.TIMEOUT, "late"))).end == Failure(Category.TIMEOUT, "late", 1)

    def test_it_has_messages_ledger_and_metrics_so_far_also_amid_calls(self) -> None:
        machine = fresh()
        takes_turn(machine, 5)
        first, *_ = starts(machine, *CALLS)
        machine.accept(returned(first))
        outcome = ends(machine, Ended(Failure(Category.TIMEOUT, "late")))
        assert outcome.messages == (SYSTEM, USER, ANSWER)
        assert outcome.segments == machine.ledger.segments
        assert outcome.segments[0].sample().response_ids == ids(5)
        assert outcome.metrics == machine.metrics
        assert outcome.metrics.turns == 1

    def test_what_the_edge_noticed_is_a_warning_with_its_turn(self) -> None:
        machine = fresh()
        takes_turn(machine, 5)
        takes_turn(machine, 6, notes=(("resampled", "twice"), ("logprobs", "none")))
        machine.accept(Note(2, "word", "a note is none"))
        assert ends(machine, STOP).warnings == (Warned("resampled", "twice", 2), Warned("logprobs", "none", 2))

    def test_a_turn_that_was_never_answered_may_have_been_generated_all_the_same(self) -> None:
        machine = fresh()
        asks(machine)
        machine.accept(Note(1, "resampled", "in turn 1"))
        machine.accept(answered(1, 5))
        asks(machine)
        machine.accept(Note(2, "resampled", "once"))
        machine.accept(Note(2, "resampled", "twice"))
        machine.accept(Note(2, "word", "a note is none"))
        assert ends(machine, Ended(Cancellation("enough"))).warnings == (Warned("resampled", "twice", 2),)

    def test_an_answer_says_itself_what_came_of_asking_again(self) -> None:
        machine = fresh()
        asks(machine)
        machine.accept(Note(1, "resampled", "twice"))
        machine.accept(answered(1, 5))
        assert ends(machine, STOP).warnings == ()

    def test_it_is_decided_once(self) -> None:
        machine = fresh()
        outcome = ends(machine, STOP)
        assert_refused(machine, Ended(Cancellation("too late")))
        assert machine.outcome is outcome


def test_more_turns_and_calls_than_there_are_small_numbers() -> None:
    """Above 256, equal ints are not the same object in CPython; ints in records read from a log never are."""
    machine = fresh(Limits(turns=300, tool_turns=290))
    for turn in range(1, 301):
        asks(machine)
        machine.accept(answered(turn, 5))
        if turn <= 290:
            machine.accept(ToolStarted(int(str(turn)), 0, CALL))
            machine.accept(ToolReturned(int(str(turn)), 0, replace(CALL), RESULT, False))
    assert machine.request_completion() == machine.start_calls([CALL]) == LimitReached(Stop("max_turns"))
    assert machine.metrics.turns == 300

    machine = fresh()
    takes_turn(machine, *range(300))
    assert machine.metrics.generated_tokens == 300
    for index in range(300):
        machine.accept(ToolStarted(1, index, CALL))
    for index in range(300):
        machine.accept(ToolReturned(1, index, CALL, RESULT, False))
    assert machine.metrics.tool_calls == 300

    machine = fresh()
    for turn in range(300):
        takes_turn(machine, reported=ids(turn))
    assert len(machine.ledger.segments) == 300
    assert len(takes_turn(machine, reported=ids(299))) == 2, "drift of the environment, then the completion"
