"""What a call continues, and where and why it parts."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from typing import Any

import pytest
from rollout_server.core.capture.call import ModelApi, ModelCall, OfferedTool
from rollout_server.core.capture.decision import Branch, Continue, Open, Refuse
from rollout_server.core.capture.rules import AuxiliaryRule, CaptureOptions
from rollout_server.core.segment import Parting, SegmentKind

from tests.core.capture.agent_calls import ADD, Captured, Fields, call_of, called, result, says, system, user

SYSTEM, TASK = system("Be brief."), user("Add 3 and 5.")
CALL, RESULT, DONE = called({"a": 3}, reasoning="Easy."), result("8"), says("It is 8.", "Done.")
STRIPPED = called({"a": 3})


def two_turns(options: CaptureOptions | None = None, delivered: bool = True) -> Captured:
    """A conversation of two turns: a tool call, and an answer."""
    captured = Captured(options)
    captured.sample(call_of(SYSTEM, TASK, tools=(ADD,)), CALL, delivered)
    captured.sample(call_of(SYSTEM, TASK, CALL, RESULT, tools=(ADD,)), DONE, delivered)
    return captured


def decide(captured: Captured, *messages: Fields, **others: Any) -> Continue | Branch | Open:
    decision = captured.decide(call_of(*messages, **{"tools": (ADD,), **others}))
    assert isinstance(decision, Continue | Branch | Open), decision
    return decision


def parting_of(decision: object) -> Parting:
    assert isinstance(decision, Branch | Open)
    assert decision.parting is not None
    return decision.parting


def test_the_first_call_opens_the_main_conversation() -> None:
    captured = Captured()
    decision = captured.sample(call_of(SYSTEM, TASK), says("8"))
    assert decision == Open(SegmentKind.MAIN, (SYSTEM, TASK), None, auxiliary=False, plan=decision.plan)
    settlement = captured.tree.settle()
    assert (settlement.main, settlement.masked, settlement.report.parted) == (0, (), 0)


def test_a_history_that_goes_on_continues_its_conversation() -> None:
    captured = two_turns()
    assert decide(captured, SYSTEM, TASK, CALL, RESULT, DONE, user("On.")) == Continue(0, (user("On."),), plan=None)  # type: ignore[arg-type]
    assert captured.conversations == {0: [SYSTEM, TASK, CALL, RESULT, DONE]}


class TestParting:
    """Where, why, and what it is called."""

    def test_after_an_earlier_answer_it_branches(self) -> None:
        decision = decide(two_turns(), SYSTEM, TASK, STRIPPED, result("9"), api=ModelApi.CHAT, client_agent="sub-1")
        assert decision == Branch(
            conversation=0,
            after_turn=1,
            messages=(result("9"),),
            parting=Parting(3, "content", "8", "9", "chat", "sub-1"),
            plan=decision.plan,
        )

    def test_a_history_that_ends_before_the_next_answer(self) -> None:
        captured = two_turns()
        decision = decide(captured, SYSTEM, TASK, STRIPPED, RESULT)
        assert isinstance(decision, Branch)
        assert (decision.after_turn, decision.messages) == (1, (RESULT,))
        assert parting_of(decision) == Parting(4, "history", "It is 8.", "", "grpc")

    def test_a_rewritten_system_prompt_is_drift(self) -> None:
        dated = [system(f"Be brief. {'x' * 300} Today is {day}.") for day in ("Sunday", "Monday")]
        captured = Captured()
        captured.sample(call_of(dated[0], TASK, tools=(ADD,)), CALL)
        decision = decide(captured, dated[1], TASK, CALL, RESULT)
        assert isinstance(decision, Open)
        assert decision.kind is SegmentKind.DRIFT
        assert decision.messages == (
            dated[1],
            TASK,
            called({"a": 3}, reasoning="Easy.", ids=["call00000"]),
            result("8", "call00000"),
        )
        parting = parting_of(decision)
        assert (parting.message, parting.field) == (0, "content")
        assert parting.expected.endswith("Today is Sunday.")
        assert parting.found.endswith("Today is Monday.")
        assert max(len(parting.expected), len(parting.found)) <= 200

    def test_a_shorter_history_under_the_same_prompt_is_a_compaction(self) -> None:
        captured = two_turns()
        decision = decide(captured, SYSTEM, user("So far: 8."), says("It is 8."), user("On."))
        assert isinstance(decision, Open)
        assert decision.kind is SegmentKind.COMPACTION
        assert parting_of(decision) == Parting(1, "content", "Add 3 and 5.", "So far: 8.", "grpc")

    def test_of_a_conversation_that_waits_there_is_no_compaction(self) -> None:
        captured = two_turns()
        captured.start(call_of(SYSTEM, TASK, CALL, RESULT, DONE, user("On."), tools=(ADD,)))
        decision = decide(captured, SYSTEM, user("So far: 8."))
        assert isinstance(decision, Open)
        assert decision.kind is SegmentKind.DRIFT

    def test_another_prompt_is_a_subagent(self) -> None:
        decision = decide(two_turns(), system("Find files."), user("Where?"))
        assert isinstance(decision, Open)
        assert decision.kind is SegmentKind.SUBAGENT
        assert parting_of(decision).field == "content"

    def test_another_agent_of_the_client_is_a_subagent(self) -> None:
        decision = decide(two_turns(), SYSTEM, user("Where?"), client_agent="sub-1")
        assert isinstance(decision, Open)
        assert decision.kind is SegmentKind.SUBAGENT

    @pytest.mark.parametrize(
        "tools",
        [
            (),
            (ADD, replace(ADD, name="sub")),
            (replace(ADD, description="Adds numbers."),),
            (replace(ADD, parameters_json_schema="{}"),),
            (replace(ADD, strict=True),),
        ],
    )
    def test_other_tools_open_a_conversation(self, tools: tuple[OfferedTool, ...]) -> None:
        decision = decide(two_turns(), SYSTEM, TASK, CALL, RESULT, DONE, user("On."), tools=tools)
        assert isinstance(decision, Open)
        assert decision.kind is SegmentKind.SUBAGENT
        assert parting_of(decision) == Parting(0, "tools", "add", ", ".join(tool.name for tool in tools), "grpc")

    def test_the_order_of_tools_counts_but_not_that_of_keys(self) -> None:
        sub = replace(ADD, name="sub")
        captured = Captured()
        captured.sample(call_of(TASK, tools=(ADD, sub)), says("8"))
        schema = '{"properties":{"a":{"type":"number"}},"type":"object"}'
        same = (replace(ADD, parameters_json_schema=schema), sub)
        assert isinstance(decide(captured, TASK, says("8"), user("On."), tools=same), Continue)
        assert isinstance(decide(captured, TASK, says("8"), user("On."), tools=(sub, ADD)), Open)

    @pytest.mark.parametrize("schema", ["{", "[]", "NaN"])
    def test_a_schema_that_is_no_object_is_refused(self, schema: str) -> None:
        refused = Captured().decide(call_of(TASK, tools=(ADD, replace(ADD, parameters_json_schema=schema))))
        assert isinstance(refused, Refuse)
        assert refused.field == "tools[1].parameters_json_schema"

    def test_texts_that_utf8_cannot_encode(self) -> None:
        captured = Captured()
        captured.sample(call_of(user("\ud800 a")), says("8"))
        assert parting_of(captured.decide(call_of(user("\ud800 b")))).found == "? b"


class TestParallel:
    """A conversation that waits for a completion is not continued."""

    def test_other_messages_branch(self) -> None:
        captured = two_turns()
        history = [SYSTEM, TASK, CALL, RESULT, DONE]
        pending = captured.start(call_of(*history, user("One."), tools=(ADD,)))
        decision = captured.decide(call_of(*history, user("Two."), tools=(ADD,)))
        assert isinstance(decision, Branch)
        assert (decision.conversation, decision.after_turn) == (0, 2)
        assert decision.parting == Parting(5, "parallel", "One.", "Two.", "grpc")
        second = captured.begin(decision)
        captured.complete(second, says("2"))
        captured.complete(pending, says("1"))
        assert captured.conversations == {
            0: [*history, user("One."), says("1")],
            1: [*history, user("Two."), says("2")],
        }
        for text, conversation in (("1", 0), ("2", 1)):
            asked = user("One." if text == "1" else "Two.")
            goes_on = decide(captured, *history, asked, says(text), user("On."))
            assert isinstance(goes_on, Continue)
            assert goes_on.conversation == conversation

    def test_two_equal_agents(self) -> None:
        """Each has its own conversation, as long as ids tell their answers apart, or the answers differ."""
        captured, call = Captured(), call_of(SYSTEM, TASK, tools=(ADD,))
        first, second = captured.start(call), captured.start(call)
        assert parting_of(captured.decide(call)) == Parting(2, "parallel", "", "", "grpc")
        captured.complete(first, called({"a": 3}, ids=["x"]))
        captured.complete(second, called({"a": 3}, ids=["y"]))
        for call_id, conversation in (("y", 1), ("x", 0)):
            history = [SYSTEM, TASK, called({"a": 3}, ids=[call_id]), result("8", call_id)]
            decision = captured.sample(call_of(*history, tools=(ADD,)), says(f"{call_id}: 8"))
            assert isinstance(decision, Continue)
            assert decision.conversation == conversation

    def test_equal_answers_without_ids_are_both_continued(self) -> None:
        captured, call = Captured(), call_of(TASK)
        first, second = captured.start(call), captured.start(call)
        captured.complete(first, says("8"))
        captured.complete(second, says("8"))
        goes_on = call_of(TASK, says("8"), user("On."))
        pending = [captured.start(goes_on), captured.start(goes_on)]
        assert [each.conversation.id for each in pending] == [1, 0], "the newest first"

    def test_ids_of_earlier_answers_tell_later_ones_apart(self) -> None:
        captured, call = Captured(), call_of(TASK, tools=(ADD,))
        pending = [captured.start(call), captured.start(call)]
        histories = []
        for each, call_id in zip(pending, "xy", strict=True):
            sampled = called({"a": 3}, ids=[call_id])
            captured.complete(each, sampled)
            histories.append([TASK, sampled, result("8", call_id)])
        for history in histories:
            captured.sample(call_of(*history, tools=(ADD,)), says("8"))
        for conversation, history in enumerate(histories):
            decision = decide(captured, *history, says("8"), user("On."))
            assert isinstance(decision, Continue)
            assert decision.conversation == conversation

    def test_a_repeated_id_counts_more_than_a_conversation_that_is_free(self) -> None:
        captured, call = Captured(), call_of(TASK)
        for each in [captured.start(call), captured.start(call)]:
            captured.complete(each, says("8"))
        first = {1: "completion-1"}
        captured.sample(call_of(TASK, says("8"), user("One."), ids=first), says("9"))
        decision = captured.decide(call_of(TASK, says("8"), user("Two."), ids=first))
        assert isinstance(decision, Branch)
        assert (decision.conversation, decision.after_turn) == (0, 1)

    def test_reasoning_of_earlier_answers_tells_later_ones_apart(self) -> None:
        captured, call = Captured(), call_of(TASK)
        pending = [captured.start(call), captured.start(call)]
        for each, thought in zip(pending, "xy", strict=True):
            captured.complete(each, says("8", thought))
        for thought in "xy":
            captured.sample(call_of(TASK, says("8", thought), user("On.")), says("9"))
        decision = decide(captured, TASK, says("8", "x"), user("On."), says("9"), user("On."), tools=())
        assert isinstance(decision, Continue)
        assert decision.conversation == 0

    def test_a_closed_conversation_is_branched_from(self) -> None:
        captured = two_turns()
        pending = captured.start(call_of(SYSTEM, TASK, CALL, RESULT, DONE, user("long" * 99), tools=(ADD,)))
        captured.tree.failed(pending)
        decision = decide(captured, SYSTEM, TASK, CALL, RESULT, DONE, user("short"))
        assert isinstance(decision, Branch)
        assert (decision.after_turn, decision.messages) == (2, (user("short"),))


class TestPrevious:
    """The client names the completion that its messages follow."""

    def test_it_continues(self) -> None:
        captured = two_turns()
        decision = decide(captured, user("On."), previous="completion-2")
        assert decision == Continue(0, (user("On."),), plan=None)  # type: ignore[arg-type]
        captured.begin(decision)
        assert captured.tree.settle().report.restored == 0

    def test_it_branches(self) -> None:
        decision = decide(two_turns(), result("9"), previous="completion-1")
        assert isinstance(decision, Branch)
        assert (decision.after_turn, decision.messages) == (1, (result("9"),))

    def test_it_names_one_of_equal_answers(self) -> None:
        captured, call = Captured(), call_of(TASK)
        pending = [captured.start(call), captured.start(call)]
        for each in pending:
            captured.complete(each, says("8"))
        for number, conversation in ((1, 0), (2, 1)):
            decision = decide(captured, user("On."), previous=f"completion-{number}", tools=())
            assert isinstance(decision, Continue)
            assert decision.conversation == conversation

    def test_instructions_are_not_inherited(self) -> None:
        captured = Captured()
        captured.sample(ModelCall(call_of(TASK).messages, instructions=("Be brief.",)), says("8"))
        on = call_of(user("On.")).messages
        same = ModelCall(on, instructions=("Be brief.",), previous="completion-1")
        assert isinstance(captured.decide(same), Continue)
        other = captured.decide(ModelCall(on, instructions=("Be kind.",), previous="completion-1"))
        assert isinstance(other, Open)
        assert other.messages == (system("Be kind."), TASK, says("8"), user("On."))
        none = captured.decide(ModelCall(on, previous="completion-1"))
        assert isinstance(none, Open)
        assert none.messages == (TASK, says("8"), user("On."))

    def test_a_system_message_is_inherited(self) -> None:
        captured = Captured()
        captured.sample(call_of(SYSTEM, TASK), says("8"))
        assert isinstance(decide(captured, user("On."), previous="completion-1", tools=()), Continue)

    def test_an_unknown_id_is_refused(self) -> None:
        refused = two_turns().decide(call_of(user("On."), previous="completion-9"))
        assert isinstance(refused, Refuse)
        assert (refused.reason, refused.field) == ("UNKNOWN_COMPLETION", "previous")

    def test_a_message_names_the_completion_that_it_repeats(self) -> None:
        captured, call = Captured(), call_of(TASK)
        pending = [captured.start(call), captured.start(call)]
        for each in pending:
            captured.complete(each, says("8"))
        decision = captured.decide(call_of(TASK, says("8"), user("On."), ids={1: "completion-1"}))
        assert isinstance(decision, Continue)
        assert decision.conversation == 0


class TestTransportTexts:
    """Texts that a client adds for its provider."""

    def test_a_billing_header_that_changes_does_not_part(self) -> None:
        def instructed(nonce: str) -> tuple[str, ...]:
            return f"x-anthropic-billing-header: cc_version=2.1; cch={nonce};", "Be brief."

        captured = Captured()
        first = ModelCall(call_of(TASK).messages, instructions=instructed("a1"))
        decision = captured.sample(first, says("8"))
        assert decision.messages == (SYSTEM, TASK)
        second = ModelCall(call_of(TASK, says("8"), user("On.")).messages, instructions=instructed("b2"))
        assert isinstance(captured.sample(second, says("9")), Continue)
        assert captured.tree.settle().report.dropped == 2

    def test_a_part_of_a_system_message(self) -> None:
        options = CaptureOptions(dropped_instructions=(r"^nonce ",))
        content = [{"type": "text", "text": text} for text in ("nonce 1", "Be brief.")]
        call = call_of({"role": "system", "content": content}, system("nonce 2"), user("nonce 3"))
        assert Captured(options).decide(call).messages == (SYSTEM, user("nonce 3"))

    def test_dates_stay(self) -> None:
        captured = Captured()
        captured.sample(call_of(system("Today is Sunday."), TASK), says("8"))
        assert isinstance(captured.decide(call_of(system("Today is Monday."), TASK, says("8"), user("On."))), Open)


class TestHostedTools:
    """Tools that the provider of an API would run."""

    def test_they_are_left_out_and_counted(self) -> None:
        captured = Captured()
        captured.sample(call_of(TASK, hosted_tools=("web_search", "image_generation")), says("8"))
        assert captured.tree.settle().report.dropped == 2

    def test_they_are_refused(self) -> None:
        captured = Captured(CaptureOptions(hosted_tools="refuse"))
        refused = captured.decide(call_of(TASK, hosted_tools=("web_search",)))
        assert isinstance(refused, Refuse)
        assert (refused.reason, refused.field) == ("HOSTED_TOOL", "hosted_tools[0]")
        assert "web_search" in refused.text


class TestAuxiliary:
    """Calls beside the task."""

    TITLE = system("You are a title generator. You output only a title.")

    def test_a_declared_call_first(self) -> None:
        captured = Captured()
        decision = captured.sample(call_of(TASK, auxiliary=True), says("Sums"))
        assert isinstance(decision, Open)
        assert (decision.kind, decision.auxiliary) == (SegmentKind.SUBAGENT, True)
        decision = captured.sample(call_of(TASK), says("8"))
        assert isinstance(decision, Open)
        assert (decision.kind, decision.auxiliary) == (SegmentKind.MAIN, False)
        settlement = captured.tree.settle()
        assert (settlement.main, settlement.masked) == (1, ((1, "auxiliary"),))
        assert settlement.report.auxiliary == 1

    def test_a_declared_call_does_not_continue_the_conversation(self) -> None:
        captured = two_turns()
        history = [SYSTEM, TASK, CALL, RESULT, DONE]
        decision = captured.sample(call_of(*history, user("A title?"), tools=(ADD,), auxiliary=True), says("Sums"))
        assert isinstance(decision, Branch)
        assert (decision.after_turn, decision.auxiliary) == (2, True)
        assert isinstance(decide(captured, *history, user("On.")), Continue)
        assert captured.tree.settle().masked == ((3, "auxiliary"),)

    def test_a_call_of_the_task_after_one_beside_it_trains(self) -> None:
        captured = Captured()
        captured.sample(call_of(TASK, auxiliary=True), says("8"))
        decision = captured.sample(call_of(TASK, says("8"), user("On.")), says("9"))
        assert isinstance(decision, Branch)
        assert not decision.auxiliary
        captured.sample(call_of(TASK, says("8"), user("On."), says("9"), user("On."), auxiliary=True), says("10"))
        assert captured.tree.settle().masked == ((1, "auxiliary"), (3, "auxiliary"))

    @pytest.mark.parametrize(
        ("call", "auxiliary"),
        [
            (call_of(TITLE, TASK), True),
            (ModelCall(call_of(TASK).messages, instructions=("You are an agent.", "You are a title generator.")), True),
            (call_of(system("Analyze if this message indicates a new conversation topic. If so, ..."), TASK), True),
            (call_of(system("Summarize this coding conversation in under 50 characters."), TASK), True),
            (call_of(system("Generate a concise, sentence-case title (3-7 words) that ..."), TASK), True),
            (call_of(system("You are coming up with a succinct title for a coding session"), TASK), True),
            (call_of(system("Generate a short story. Its title is open."), TASK), False),
            (call_of(system("You help. Generate a short title"), TASK), False),
            (call_of(TITLE, TASK, tools=(ADD,)), False),
            (call_of(system("Be brief."), user("You are a title generator")), False),
        ],
    )
    def test_title_calls_of_known_clients(self, call: ModelCall, auxiliary: bool) -> None:
        decision = Captured().decide(call)
        assert isinstance(decision, Open)
        assert decision.auxiliary is auxiliary

    def test_a_rule_by_the_name_of_the_model(self) -> None:
        captured = Captured(CaptureOptions(auxiliary=(AuxiliaryRule(model=r"small-\d++"),)))
        assert [captured.decide(call_of(TASK, model=name)).auxiliary for name in ("small-3", "my-small-3")] == [
            True,
            False,
        ]

    def test_a_guess_only_by_setting(self) -> None:
        for guess in (False, True):
            captured = Captured(CaptureOptions(guess_auxiliary=guess))
            captured.sample(call_of(system("Name it."), TASK), says("Sums"))
            captured.sample(call_of(SYSTEM, TASK, tools=(ADD,)), CALL)
            captured.sample(call_of(SYSTEM, TASK, CALL, RESULT, tools=(ADD,)), DONE)
            settlement = captured.tree.settle()
            assert settlement.main == 1, "a conversation with tools"
            assert settlement.masked == (((1, "auxiliary"),) if guess else ())

    def test_without_tools_anywhere_there_is_nothing_to_guess(self) -> None:
        captured = Captured(CaptureOptions(guess_auxiliary=True))
        captured.sample(call_of(TASK), says("8"))
        settlement = captured.tree.settle()
        assert (settlement.main, settlement.masked) == (0, ())


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_comes_back_whatever_the_trainer_calls_it(name: str) -> None:
    captured = Captured()
    captured.sample(call_of(TASK), {**says("8"), name: "Easy."})
    assert isinstance(captured.sample(call_of(TASK, says("8", "Easy."), user("On.")), says("9")), Continue)


class TestAsTemplate:
    """Hard case b: where a template drops reasoning, the conversation is cut."""

    OPTIONS = CaptureOptions(history="as_template")

    def test_reasoning_sent_back_continues(self) -> None:
        captured = two_turns(self.OPTIONS)
        assert len(captured.conversations) == 1

    def test_reasoning_not_sent_back_parts_there(self) -> None:
        captured = Captured(self.OPTIONS)
        captured.sample(call_of(SYSTEM, TASK, tools=(ADD,)), CALL)
        decision = decide(captured, SYSTEM, TASK, STRIPPED, RESULT)
        assert isinstance(decision, Open)
        assert decision.kind is SegmentKind.DRIFT
        assert parting_of(decision) == Parting(2, "reasoning", "Easy.", "", "grpc")
        assert "reasoning_content" not in decision.messages[2]

    def test_it_branches_after_the_last_answer_that_came_back_whole(self) -> None:
        captured = Captured(self.OPTIONS)
        captured.sample(call_of(TASK), CALL)
        captured.sample(call_of(TASK, CALL, RESULT), CALL)
        decision = decide(captured, TASK, CALL, RESULT, STRIPPED, RESULT, tools=())
        assert isinstance(decision, Branch)
        assert decision.after_turn == 1
        assert parting_of(decision).message == 3

    def test_a_user_message_parts(self) -> None:
        captured = two_turns(self.OPTIONS)
        history = [SYSTEM, TASK, CALL, RESULT, DONE, user("On.")]
        decision = captured.sample(call_of(*history, tools=(ADD,)), CALL)
        assert isinstance(decision, Open)
        assert parting_of(decision).field == "reasoning"
        shown = captured.conversations[1]
        assert [each.get("reasoning_content") for each in shown] == [None, None, "Easy.", None, "Done.", None, "Easy."]
        assert isinstance(decide(captured, *history, CALL, RESULT), Continue)

    def test_answers_without_reasoning_are_continued(self) -> None:
        captured = Captured(self.OPTIONS)
        captured.sample(call_of(TASK), says("8"))
        assert isinstance(captured.sample(call_of(TASK, says("8"), user("On.")), says("9")), Continue)

    def test_an_open_conversation_with_stripped_answers_is_not_that_with_whole_ones(self) -> None:
        captured = Captured(self.OPTIONS)
        captured.sample(call_of(TASK), CALL)
        captured.sample(call_of(TASK, CALL, RESULT), says("8"))
        stripped = [TASK, STRIPPED, RESULT]
        captured.sample(call_of(*stripped), says("8"))
        decision = decide(captured, *stripped, says("8"), user("On."), tools=())
        assert isinstance(decision, Continue)
        assert decision.conversation == 1


def steps(captured: Captured, call: ModelCall) -> int:
    """The number of function calls that a decision takes."""
    count = 0

    def note(*_: object) -> None:
        nonlocal count
        count += 1

    before = sys.getprofile()
    gc.disable()  # a collection calls functions, too
    sys.setprofile(note)
    try:
        captured.decide(call)
    finally:
        sys.setprofile(before)
        gc.enable()
    return count


def test_a_decision_takes_no_longer_in_a_rollout_of_many_conversations() -> None:
    calls = [
        call_of(SYSTEM, TASK, says("8"), user("On."), user("On.")),
        call_of(SYSTEM, TASK, says("9"), user("On.")),
        call_of(SYSTEM, user("Nothing known.")),
    ]
    few, many = Captured(), Captured()
    for captured, count in ((few, 2), (many, 300)):
        captured.sample(call_of(SYSTEM, TASK), says("8"))
        for number in range(count):
            captured.sample(call_of(SYSTEM, user(f"Question {number}")), says("8"))
        captured.sample(call_of(SYSTEM, TASK, says("8"), user("On.")), says("9"))
    assert len(many.conversations) == 301
    assert [steps(many, call) for call in calls] == [steps(few, call) for call in calls]


def test_an_empty_piece_of_an_answer_is_not_an_empty_completion() -> None:
    captured = Captured(CaptureOptions(history="as_template"))
    first = call_of(user("3 + 5?"))
    captured.sample(first, says(""))
    captured.sample(first, says("8", reasoning="Easy."))
    decision = captured.decide(call_of(user("3 + 5?"), says(""), says("8"), user("On.")))
    assert isinstance(decision, Open)
    assert [message["content"] for message in decision.messages] == ["3 + 5?", "8", "On."]
