"""An answer that was lost and asked for again trains once; any other equal request is a sibling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rollout_server.core.capture.call import ModelCall
from rollout_server.core.capture.decision import Branch, Continue, Delivering, Join, Open, Replay
from rollout_server.core.capture.rules import CaptureOptions
from rollout_server.core.capture.tree import DELIVERY_SECONDS, REPLAY_SECONDS
from rollout_server.core.segment import SegmentKind
from rollout_server.core.spec import Sampling

from tests.core.capture.agent_calls import Captured, call_of, called, result, says, user

TASK = user("Add 3 and 5.")
CALL = call_of(TASK)


def lost() -> Captured:
    """A completion that was sampled, but not confirmed."""
    captured = Captured()
    captured.sample(CALL, says("8"), delivered=False)
    return captured


class TestWhileItIsSampled:
    def test_a_call_whose_connection_is_dead_is_joined(self) -> None:
        captured = Captured()
        pending = captured.start(CALL)
        captured.tree.disconnected(pending)
        assert captured.decide(CALL) == Join(pending)
        assert isinstance(captured.decide(CALL), Open), "the new caller is alive"
        assert captured.tree.settle().report.joined == 1

    def test_a_call_whose_connection_lives_gets_a_sibling(self) -> None:
        captured = Captured()
        pending = captured.start(CALL)
        sibling = captured.decide(CALL)
        assert isinstance(sibling, Open)
        assert sibling.kind is SegmentKind.DRIFT
        captured.begin(sibling)
        captured.tree.disconnected(pending)
        assert captured.decide(CALL) == Join(pending)

    def test_a_marked_call_joins(self) -> None:
        captured = Captured()
        pending = captured.start(CALL)
        assert captured.decide(call_of(TASK, repeated=True)) == Join(pending)

    def test_an_equal_key_marks(self) -> None:
        captured = Captured()
        pending = captured.start(call_of(TASK, repeat_key="a"))
        assert captured.decide(call_of(TASK, repeat_key="a")) == Join(pending)
        assert isinstance(captured.decide(call_of(TASK, repeat_key="b")), Open)

    def test_another_key_is_another_request(self) -> None:
        captured = Captured()
        pending = captured.start(call_of(TASK, repeat_key="a"))
        captured.tree.disconnected(pending)
        assert isinstance(captured.decide(call_of(TASK, repeat_key="b")), Open)
        assert captured.decide(CALL) == Join(pending)

    def test_of_a_continued_conversation(self) -> None:
        captured = Captured()
        captured.sample(CALL, says("8"))
        on = call_of(TASK, says("8"), user("On."))
        pending = captured.start(on)
        sibling = captured.decide(on)
        assert isinstance(sibling, Branch)
        assert sibling.after_turn == 1
        captured.tree.disconnected(pending)
        assert captured.decide(on) == Join(pending)

    def test_a_failed_call_is_not_joined(self) -> None:
        captured = Captured()
        pending = captured.start(CALL)
        captured.tree.disconnected(pending)
        captured.tree.failed(pending)
        assert isinstance(captured.decide(CALL), Open)


class TestOnceItIsSampled:
    def test_an_answer_that_did_not_arrive_is_replayed(self) -> None:
        captured = lost()
        assert captured.decide(CALL) == Replay("completion-1")
        assert captured.decide(CALL) == Replay("completion-1")
        assert captured.tree.confirmed("completion-1")
        assert isinstance(captured.decide(CALL), Open)
        assert captured.tree.settle().report.replayed == 2

    def test_an_answer_that_may_be_on_its_way_is_waited_for(self) -> None:
        captured = lost()
        captured.now = DELIVERY_SECONDS - 0.125
        assert captured.decide(CALL) == Delivering("completion-1", 0.125)
        assert captured.decide(call_of(TASK, repeated=True)) == Replay("completion-1"), (
            "its client knows that it is lost"
        )
        assert captured.tree.confirmed("completion-1")
        assert isinstance(captured.decide(CALL), Open), "it was another agent's"

    def test_nothing_is_on_its_way_to_a_dead_connection(self) -> None:
        captured = Captured()
        pending = captured.start(CALL)
        captured.tree.disconnected(pending)
        captured.complete(pending, says("8"), delivered=False)
        captured.now = 0.0
        assert captured.decide(CALL) == Replay("completion-1")

    @pytest.mark.parametrize("marked", [{"repeated": True}, {"repeat_key": "a"}])
    def test_a_marked_call_gets_an_answer_that_arrived(self, marked: dict[str, Any]) -> None:
        captured = Captured()
        captured.sample(call_of(TASK, repeat_key="a"), says("8"))
        assert captured.decide(call_of(TASK, **marked)) == Replay("completion-1")

    def test_until_it_is_continued(self) -> None:
        captured = lost()
        captured.sample(call_of(TASK, says("8"), user("On.")), says("9"))
        assert isinstance(captured.decide(call_of(TASK, repeated=True)), Open)

    def test_for_ten_minutes(self) -> None:
        captured = lost()
        captured.now = REPLAY_SECONDS
        assert captured.decide(CALL) == Replay("completion-1")
        captured.now += 1
        assert isinstance(captured.decide(CALL), Open)

    def test_the_time_counts_from_the_completion(self) -> None:
        captured = Captured()
        pending = captured.start(CALL)
        captured.now = 599.0
        captured.complete(pending, says("8"), delivered=False)
        captured.now = 1100.0
        assert captured.decide(CALL) == Replay("completion-1")

    @pytest.mark.parametrize(
        "other",
        [
            call_of(TASK, sampling=Sampling(temperature=0.5)),
            call_of(TASK, sampling=Sampling(extra_json='{"tool_choice": "none"}')),
            call_of(TASK, client_agent="sub-1"),
            call_of(TASK, model="other"),
            call_of(TASK, auxiliary=True),
            call_of(user("Add 3 and 6.")),
        ],
    )
    def test_another_request_is_not_a_repetition(self, other: ModelCall) -> None:
        assert isinstance(lost().decide(other), Open)

    def test_the_spelling_does_not_count(self) -> None:
        captured = Captured()
        sampling = Sampling(temperature=0.5, stop=("END",))
        captured.sample(call_of(TASK, sampling=sampling), says("8"), delivered=False)
        content = [{"type": "text", "text": TASK["content"]}]
        assert captured.decide(call_of({"role": "user", "content": content}, sampling=sampling)) == Replay(
            "completion-1"
        )

    def test_within_a_conversation(self) -> None:
        captured = Captured()
        captured.sample(CALL, called({"a": 3}, reasoning="Easy."))
        captured.sample(call_of(TASK, called({"a": 3}), result("8")), says("8"), delivered=False)
        again = call_of(TASK, called({"a": 3}, ids=["y"]), result("8", "y"))
        assert captured.decide(again) == Replay("completion-2")
        assert captured.tree.settle().masked == ()

    def test_of_two_agents_the_one_whose_ids_are_repeated(self) -> None:
        captured = Captured()
        histories = []
        pending = [captured.start(CALL), captured.start(CALL)]
        for each, call_id in zip(pending, "xy", strict=True):
            captured.complete(each, called({"a": 3}, ids=[call_id]))
            histories.append(call_of(TASK, called({"a": 3}, ids=[call_id]), result("8", call_id)))
        captured.sample(histories[0], says("8"), delivered=False)
        assert isinstance(captured.decide(histories[1]), Continue), "the other agent's own call"
        assert captured.decide(histories[0]) == Replay("completion-3")

    def test_of_two_equal_agents_the_one_that_has_not_called_yet(self) -> None:
        """The second agent's call looks like a repetition of the first one's, whose answer is still on its way."""
        captured = Captured()
        for pending in (captured.start(CALL), captured.start(CALL)):
            captured.complete(pending, says("8"))
        again = call_of(TASK, says("8"), user("On."))
        captured.sample(again, says("9"), delivered=False)
        assert captured.decide(call_of(TASK, says("8"), user("On."), repeated=True)) == Replay("completion-3")
        captured.sample(again, says("9"), delivered=False)
        assert captured.decide(again) in (Replay("completion-3"), Replay("completion-4"))
        assert captured.tree.settle().masked == ()

    def test_an_unknown_completion_is_not_confirmed(self) -> None:
        assert not Captured().tree.confirmed("completion-1")


class TestSettlement:
    def siblings(self, options: CaptureOptions | None = None) -> Captured:
        """Three answers to the same messages, of which the second one is continued."""
        captured = Captured(options)
        for text in "abc":
            captured.sample(CALL, says(text))
        captured.sample(call_of(TASK, says("b"), user("On.")), says("d"))
        return captured

    def test_siblings_that_led_nowhere_are_masked(self) -> None:
        settlement = self.siblings().tree.settle()
        assert settlement.masked == ((1, "abandoned"), (3, "abandoned"))
        assert settlement.main == 1
        assert (settlement.report.abandoned, settlement.report.parted) == (2, 2)

    def test_or_train_by_setting(self) -> None:
        settlement = self.siblings(CaptureOptions(abandoned="train")).tree.settle()
        assert settlement.masked == ()
        assert settlement.report.abandoned == 2

    def test_siblings_that_were_all_continued_train(self) -> None:
        captured = Captured()
        for text in "ab":
            captured.sample(CALL, says(text))
            captured.sample(call_of(TASK, says(text), user("On.")), says("d"))
        assert captured.tree.settle().masked == ()

    def test_siblings_none_of_which_was_continued_train(self) -> None:
        captured = Captured()
        for text in "ab":
            captured.sample(CALL, says(text))
        assert captured.tree.settle().masked == ()

    def test_the_answers_of_two_sub_agents_to_the_same_messages_train(self) -> None:
        captured = Captured()
        first, second = (replace(CALL, client_agent=name) for name in ("sub-1", "sub-2"))
        captured.sample(first, says("a"))
        captured.sample(second, says("b"))
        captured.sample(call_of(TASK, says("a"), user("On."), client_agent="sub-1"), says("c"))
        assert captured.tree.settle().masked == ()

    def test_a_title_call_continues_nothing(self) -> None:
        captured = Captured()
        for text in "ab":
            captured.sample(CALL, says(text))
        captured.sample(call_of(TASK, says("a"), user("A title?"), auxiliary=True), says("Sums"))
        assert captured.tree.settle().masked == ((3, "auxiliary"),)

    def test_an_answer_that_nobody_waited_for_is_masked(self) -> None:
        for joined in (False, True):
            captured = Captured()
            pending = captured.start(CALL)
            captured.tree.disconnected(pending)
            if joined:
                assert captured.decide(CALL) == Join(pending)
            captured.complete(pending, says("8"), delivered=joined)
            assert captured.tree.settle().masked == (() if joined else ((1, "abandoned"),))

    def test_an_answer_that_was_lost_and_replayed_trains_once(self) -> None:
        captured = Captured()
        pending = captured.start(CALL)
        captured.tree.disconnected(pending)
        captured.complete(pending, says("8"), delivered=False)
        assert captured.decide(CALL) == Replay("completion-1")
        settlement = captured.tree.settle()
        assert (settlement.masked, captured.turn) == ((), 1)

    def test_the_main_conversation_is_the_last_of_its_lineage(self) -> None:
        """A compaction replaces what came before; a subagent never is the main conversation."""
        captured = Captured()
        captured.sample(CALL, says("8"))
        captured.sample(call_of(TASK, says("8"), user("Summarize.")), says("8 was found."))
        captured.sample(call_of(user("So far: 8."), user("On.")), says("9"))
        captured.sample(call_of(user("Find files."), client_agent="sub-1"), says("none"))
        settlement = captured.tree.settle()
        assert captured.conversations[1] == [user("So far: 8."), user("On."), says("9")]
        assert settlement.main == 1

    def test_without_a_completion_there_is_no_main_conversation(self) -> None:
        captured = Captured()
        captured.start(CALL)
        assert captured.tree.settle().main is None
