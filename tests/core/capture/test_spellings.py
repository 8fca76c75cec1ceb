"""Histories in another spelling continue their conversation, and the completions in them are put back as sampled."""

from __future__ import annotations

from typing import Any

import pytest
from rollout_server.core.capture.call import ModelCall
from rollout_server.core.capture.decision import UNKNOWN_COMPLETION, Branch, Continue, Open, Refuse
from rollout_server.core.capture.history import InvalidHistory
from rollout_server.core.capture.rules import CaptureOptions
from rollout_server.core.segment import SegmentKind

from tests.core.capture.agent_calls import (
    ADD,
    Captured,
    Fields,
    call_of,
    called,
    result,
    says,
    system,
    user,
)

SYSTEM, TASK = system("Be brief."), user("Add 3 and 5.")
SAMPLED = called('{"a": 3, "b": [5.0, "x"]}', reasoning="Easy.")
IMAGE = "data:image/png;base64,aGk="


def parts(*texts: str) -> list[Fields]:
    return [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in texts]


def with_arguments(text: Any, **others: Any) -> Fields:
    call = {"id": "id0", "type": "function", "index": 0, "function": {"name": "add", "arguments": text}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **others}


SPELLINGS = {
    "as sampled": [SYSTEM, TASK, SAMPLED, result("8")],
    "reasoning stripped": [SYSTEM, TASK, with_arguments('{"a": 3, "b": [5.0, "x"]}'), result("8")],
    "reasoning under its other name": [
        SYSTEM,
        TASK,
        with_arguments('{"a": 3, "b": [5.0, "x"]}', reasoning="Easy."),
        result("8"),
    ],
    "arguments with other spaces and key order": [
        SYSTEM,
        TASK,
        with_arguments('{ "b":[5.0,"x"],"a":3 }'),
        result("8"),
    ],
    "numbers as JavaScript writes them": [SYSTEM, TASK, with_arguments('{"a":3,"b":[5,"x"]}'), result("8")],
    "arguments parsed": [SYSTEM, TASK, with_arguments({"a": 3, "b": [5, "x"]}), result("8")],
    "empty text for null": [SYSTEM, TASK, with_arguments('{"a": 3, "b": [5.0, "x"]}', content=""), result("8")],
    "no parts for null": [SYSTEM, TASK, with_arguments('{"a": 3, "b": [5.0, "x"]}', content=[]), result("8")],
    "developer and parts": [
        {"role": "developer", "content": parts("Be ", "brief.")},
        {"role": "user", "content": parts("Add 3 and 5."), "name": "tim"},
        SAMPLED,
        {"role": "tool", "tool_call_id": "id0", "content": parts("8"), "is_error": False, "status": "completed"},
    ],
    "ids renamed": [
        SYSTEM,
        TASK,
        called('{"a": 3, "b": [5.0, "x"]}', reasoning="Easy.", ids=["toolu_1"]),
        result("8", "toolu_1"),
    ],
    "results without ids": [SYSTEM, TASK, SAMPLED, result("8", None)],
    "reasoning as a message of its own": [
        SYSTEM,
        TASK,
        says("<think>\nEasy.\n</think>\n\n"),
        with_arguments('{"a": 3, "b": [5.0, "x"]}'),
        result("8"),
    ],
    "reasoning as an item of its own": [
        SYSTEM,
        TASK,
        says("", "Easy."),
        with_arguments('{"a": 3, "b": [5.0, "x"]}'),
        result("8"),
    ],
}


NOT_RESTORED = {
    "as sampled",
    "results without ids",
    "developer and parts",
    "reasoning under its other name",
    "reasoning as an item of its own",
    "ids renamed",
}


def after_one_call(message: Fields, options: CaptureOptions | None = None) -> Captured:
    captured = Captured(options)
    captured.sample(call_of(SYSTEM, TASK, tools=(ADD,)), message)
    return captured


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_history_in_another_spelling_continues(spelling: str) -> None:
    captured = after_one_call(SAMPLED)
    decision = captured.sample(call_of(*SPELLINGS[spelling], tools=(ADD,)), says("8"))
    assert isinstance(decision, Continue)
    assert decision.messages == ({"role": "tool", "content": "8", "tool_call_id": "id0"},)
    assert captured.conversations == {0: [SYSTEM, TASK, SAMPLED, result("8"), says("8")]}
    report = captured.tree.settle().report
    assert (report.continued, report.parted) == (1, 0)
    assert report.restored == (spelling not in NOT_RESTORED)


@pytest.mark.parametrize(
    ("sampled", "sent"),
    [
        (says("\n\n8 it is.\n"), says("8 it is.")),
        (says("8"), says("  8\n")),
        (says("<think>Easy.</think>\n\n8"), says("8")),
        (says("<think>Easy.</think>8"), says("8", "Easy.")),
        (says("8", "Easy."), says("<think>Easy.</think>\n8")),
        (says("<think>cut", ""), says("<think>cut")),
        (says("", "Easy."), says("")),
        (says("8"), {"role": "assistant", "content": [{"type": "output_text", "text": "8", "annotations": []}]}),
        (says("no"), {"role": "assistant", "content": None, "refusal": "no"}),
        (called(""), called("{}")),
        (called(""), with_arguments(None)),
        (called('{"a": 1' + "0" * 400 + "}"), called('{"a":1' + "0" * 400 + "}")),
        (called('{"a": -1' + "0" * 400 + "}"), called('{"a":-1' + "0" * 400 + "}")),
        (says("no"), {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}),
        (called('{"a": 1'), called('{"a": 1')),
        (called('{"id": 12345678901234567890}'), called('{"id":12345678901234567000}')),
        (called({"é": "\ud800"}), called('{"\\u00e9":"\\ud800"}')),
    ],
)
def test_an_answer_in_another_form_is_put_back_as_sampled(sampled: Fields, sent: Fields) -> None:
    captured = after_one_call(sampled)
    assert isinstance(captured.sample(call_of(SYSTEM, TASK, sent, user("On."), tools=(ADD,)), says("ok")), Continue)
    assert captured.conversations == {0: [SYSTEM, TASK, sampled, user("On."), says("ok")]}


def test_reasoning_that_the_server_sent_apart_is_no_other_form() -> None:
    for sent, restored in ((says("8", "Easy."), 0), (says("8"), 1), (says(" 8"), 1)):
        captured = after_one_call(says("<think>\nEasy.\n</think>\n\n8"))
        captured.sample(call_of(SYSTEM, TASK, sent, user("On."), tools=(ADD,)), says("ok"))
        assert captured.tree.settle().report.restored == restored


def test_tool_calls_as_text_are_cut_at_every_step() -> None:
    """An agent that writes calls and results as text sends no answer back as it was sampled."""
    captured, history = Captured(), [SYSTEM, TASK]
    for step in range(3):
        captured.sample(call_of(*history, tools=(ADD,)), called({"a": step}))
        history += [says(f"Calling tools: add({step})"), user(f"Observation: {step}")]
    assert len(captured.conversations) == 3
    assert [len(shown) for shown in captured.conversations.values()] == [3, 5, 7]
    assert captured.tree.settle().masked == (), "each completion trains once"


@pytest.mark.parametrize(
    ("sampled", "sent", "field"),
    [
        (says("8"), says("9"), "content"),
        (says("8"), user("8"), "role"),
        (says("a b"), says("a  b"), "content"),
        (says("8", "Easy."), says("8", "Hard."), "reasoning"),
        (says("8"), says("8", "Easy."), "reasoning"),
        (says("8", "Easy."), says("<think>Hard.</think>8"), "reasoning"),
        (called({"a": 1}), called({"a": 2}), "tool_calls"),
        (called({"a": 1}), called({"a": 1}, name="sub"), "tool_calls"),
        (called({"a": 1}, {"a": 2}), called({"a": 2}, {"a": 1}), "tool_calls"),
        (called({"a": 1}, {"a": 2}), called({"a": 1}), "tool_calls"),
        (called({"a": True}), called({"a": 1}), "tool_calls"),
        (called('{"a": 1' + "0" * 400 + "}"), called('{"a":-1' + "0" * 400 + "}"), "tool_calls"),
        (says("8"), [says("8"), says("9")], "content"),
    ],
)
def test_another_answer_parts(sampled: Fields, sent: Fields | list[Fields], field: str) -> None:
    captured = after_one_call(sampled)
    run = sent if isinstance(sent, list) else [sent]
    decision = captured.decide(call_of(SYSTEM, TASK, *run, user("On."), tools=(ADD,)))
    if isinstance(sent, list):  # the first message is the sampled answer, the second one is the agent's own
        assert isinstance(decision, Continue)
        assert decision.messages == (says("9"), user("On."))
        return
    assert isinstance(decision, Open)
    assert decision.parting is not None
    assert (decision.parting.message, decision.parting.field) == (2, field)


def test_results_find_their_calls_by_id_and_else_by_position() -> None:
    captured = after_one_call(called({"a": 1}, {"a": 2}, {"a": 3}, ids=["x", "y", "z"]))
    sent = called({"a": 1}, {"a": 2}, {"a": 3}, ids=["1", "2", "3"])
    call = call_of(SYSTEM, TASK, sent, result("c", "3"), result("a", None), result("b", "?"), tools=(ADD,))
    assert captured.decide(call).messages == (result("c", "z"), result("a", "x"), result("b", "y"))


def test_equal_ids_of_several_calls_are_used_in_order() -> None:
    captured = after_one_call(called({"a": 1}, {"a": 2}, ids=["x", "x"]))
    sent = called({"a": 1}, {"a": 2}, ids=["x", "x"])
    captured.sample(call_of(SYSTEM, TASK, sent, result("a", "x"), result("b", "x"), tools=(ADD,)), sent)
    history = [SYSTEM, TASK, sent, result("a", "x"), result("b", "x"), sent, result("c", "x")]
    assert captured.decide(call_of(*history, tools=(ADD,))).messages == (result("c", "x"),)


def test_a_late_result_finds_a_call_of_an_earlier_answer() -> None:
    captured = after_one_call(called({"a": 1}, ids=["x"]))
    first, second = called({"a": 1}, ids=["1"]), called({"a": 2}, ids=["2"])
    captured.sample(call_of(SYSTEM, TASK, first, user("And?"), tools=(ADD,)), called({"a": 2}, ids=["y"]))
    call = call_of(SYSTEM, TASK, first, user("And?"), second, result("b", "2"), result("a", "1"), tools=(ADD,))
    assert captured.decide(call).messages == (result("b", "y"), result("a", "x"))


def test_a_malformed_completion_fails_its_call() -> None:
    captured = Captured()
    pending = captured.start(call_of(TASK))
    with pytest.raises(InvalidHistory, match=r"completion\.content\[0\]\.type: must be"):
        captured.tree.completed(pending, "completion-1", {"content": [{"type": "video"}]}, 1, 0.0)
    captured.tree.failed(pending)
    assert isinstance(captured.decide(call_of(TASK, repeated=True)), Open)
    assert captured.tree.settle().main is None


def test_white_space_in_a_message_that_the_model_did_not_write_parts() -> None:
    captured = Captured()
    captured.sample(call_of(TASK, says("8"), user("Sure?")), says("Yes."))
    decision = captured.decide(call_of(TASK, says("8 "), user("Sure?"), says("Yes."), user("On.")))
    assert isinstance(decision, Open)
    assert decision.parting is not None
    assert (decision.parting.message, decision.parting.field) == (1, "content")


def test_a_result_of_another_call_parts() -> None:
    captured = after_one_call(called({"a": 1}, {"a": 2}))
    sent = called({"a": 1}, {"a": 2})
    captured.sample(call_of(SYSTEM, TASK, sent, result("a", "id0"), result("b", "id1"), tools=(ADD,)), says("ok"))
    decision = captured.decide(call_of(SYSTEM, TASK, sent, result("a", "id1"), tools=(ADD,)))
    assert isinstance(decision, Branch)
    assert (decision.parting.message, decision.parting.field) == (3, "tool_calls")
    assert decision.messages == (result("a", "id1"),)


def test_answers_in_a_row_are_found_one_by_one() -> None:
    """An agent may ask again without a message of its own."""
    captured = Captured()
    captured.sample(call_of(TASK), says("First."))
    assert captured.sample(call_of(TASK, says("First.")), says("Second.")) == Continue(0, (), plan=None)  # type: ignore[arg-type]
    decision = captured.sample(call_of(TASK, says("First."), says("Second."), user("On.")), says("ok"))
    assert isinstance(decision, Continue)
    assert captured.conversations == {0: [TASK, says("First."), says("Second."), user("On."), says("ok")]}


def test_parallel_calls_as_messages_of_their_own() -> None:
    arguments = [{"a": n} for n in range(40)]
    sampled = called(*arguments, ids=[f"x{n}" for n in range(40)])
    captured = after_one_call(sampled)
    apart = [{"role": "assistant", "content": None, "tool_calls": [call]} for call in sampled["tool_calls"]]
    decision = captured.decide(call_of(SYSTEM, TASK, *apart, result("8", "x7"), tools=(ADD,)))
    assert isinstance(decision, Continue)
    assert decision.messages == (result("8", "x7"),)


def test_messages_of_the_agent_are_rendered_without_what_does_not_count() -> None:
    captured = Captured()
    sent = call_of(
        {"role": "developer", "content": parts("Be ", "brief."), "id": "msg_1"},
        {"role": "user", "name": "tim", "content": [*parts("What "), *parts("is it?")]},
        {"role": "assistant", "content": [], "reasoning_content": "Hm.", "status": "completed"},
        called('{"a":  1}', ids=["toolu_1"]),
        {"role": "tool", "tool_call_id": "toolu_1", "content": parts("8"), "is_error": False, "name": "add"},
        {
            "role": "user",
            "content": [*parts("And this?"), {"type": "image_url", "image_url": {"url": IMAGE, "detail": "low"}}],
        },
    )
    assert captured.decide(sent).messages == (
        system("Be brief."),
        user("What is it?"),
        {**called('{"a":  1}', reasoning="Hm.", ids=["call00000"])},
        {**result("8", "call00000"), "name": "add"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "And this?"}, {"type": "image_url", "image_url": {"url": IMAGE}}],
        },
    )


def test_the_name_of_a_result_is_shown_and_parts_nothing() -> None:
    """Some templates print it. A client that sends it once and not again has sent the same result."""
    captured, named = after_one_call(SAMPLED), {**result("8"), "name": "add"}
    decision = captured.sample(call_of(SYSTEM, TASK, SAMPLED, named, tools=(ADD,)), says("8"))
    assert isinstance(decision, Continue)
    assert decision.messages == (named,)
    for again in (named, result("8"), {**named, "name": None}, {**named, "name": 3}):
        history = call_of(SYSTEM, TASK, SAMPLED, again, says("8"), user("On."), tools=(ADD,))
        assert captured.decide(history).messages == (user("On."),)


def test_ids_of_calls_that_the_model_did_not_write_count_on() -> None:
    captured = after_one_call(called({"a": 1}, {"a": 2}, ids=["x", "y"]))
    own, others = called({"a": 1}, {"a": 2}, ids=["1", "2"]), called({"a": 3}, {"a": 4}, ids=["3", "4"])
    history = [SYSTEM, TASK, own, result("a", "1"), result("b", "2"), others, result("d", "4"), result("c", "3")]
    assert captured.decide(call_of(*history, tools=(ADD,))).messages == (
        result("a", "x"),
        result("b", "y"),
        called({"a": 3}, {"a": 4}, ids=["call00002", "call00003"]),
        result("d", "call00003"),
        result("c", "call00002"),
    )


def test_another_image_parts() -> None:
    def picture(data: str) -> Fields:
        return {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}],
        }

    captured = Captured()
    captured.sample(call_of(picture("aGk=")), says("hi"))
    assert isinstance(captured.decide(call_of(picture("aGk="), says("hi"), user("On."))), Continue)
    assert isinstance(captured.decide(call_of(picture("aGo="), says("hi"), user("On."))), Open)


class TestLaterSystem:
    """They are rendered where they stand, or as the user's."""

    HISTORY = (SYSTEM, system("Today is Sunday."), TASK, says("8"), system("Be quick."), user("On."))

    def test_where_the_template_can_it_stays_a_system_message(self) -> None:
        assert Captured().decide(call_of(*self.HISTORY)).messages == self.HISTORY

    def test_elsewhere_it_is_part_of_a_user_message_and_the_first_ones_are_joined(self) -> None:
        assert Captured(later_system="user").decide(call_of(*self.HISTORY)).messages == (
            system("Be brief.\n\nToday is Sunday."),
            TASK,
            says("8"),
            user("Be quick.\n\nOn."),
        )

    def test_only_system_messages_are_joined_with_what_is_beside_them(self) -> None:
        """Templates such as Mistral's refuse two user messages in a row; an agent that sends them is not corrected."""
        captured = Captured(later_system="user")
        captured.sample(call_of(TASK), says("8"))
        image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}
        later = (user("On."), system("Be quick."), system("It is late."), user("Yes?"), user("And?"), system(""), image)
        assert captured.decide(call_of(TASK, says("8"), *later)).messages == (
            user("On.\n\nBe quick.\n\nIt is late.\n\nYes?"),
            {
                "role": "user",
                "content": [{"type": "text", "text": "And?"}, {"type": "text", "text": "\n\n"}, *image["content"]],
            },
        )

    def test_within_a_conversation(self) -> None:
        captured = Captured(later_system="user")
        captured.sample(call_of(SYSTEM, TASK), says("8"))
        assert captured.decide(call_of(SYSTEM, TASK, says("8"), system("Be quick."))) == Continue(
            0,
            (user("Be quick."),),
            plan=None,  # type: ignore[arg-type]
        )
        assert isinstance(captured.decide(call_of(SYSTEM, TASK, says("8"), user("Be quick."))), Continue)


def test_instructions_are_the_system_prompt() -> None:
    captured = Captured()
    call = ModelCall(call_of(TASK).messages, instructions=("Be brief.", "", "Be kind."))
    assert captured.decide(call).messages == (system("Be brief.\n\nBe kind."), TASK)


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ([TASK, {"content": "x"}], "messages[1].role"),
        ([{"role": "critic", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [*parts("x"), {"type": "input_audio"}]}], "messages[0].content[1].type"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x/y.png"}}]}],
            "messages[0].content[0].image_url.url",
        ),
        ([TASK, {"role": "assistant", "tool_calls": {}}], "messages[1].tool_calls"),
        ([TASK, {"role": "assistant", "tool_calls": [{"id": "x"}]}], "messages[1].tool_calls[0].function"),
        (
            [TASK, {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": 3}}]}],
            "messages[1].tool_calls[0].function.name",
        ),
        ([TASK, called({"a": 1}), {**result("8"), "tool_call_id": 3}], "messages[2].tool_call_id"),
        ([TASK, result("8")], "messages[1].tool_call_id"),
        ([TASK, {"role": "assistant", "function_call": {"name": "f"}}], "messages[1].function_call"),
        ([TASK, {"role": "assistant", "reasoning_content": []}], "messages[1].reasoning_content"),
    ],
)
def test_an_invalid_message_is_refused_by_its_path(messages: list[Fields], field: str) -> None:
    captured = Captured()
    decision = captured.decide(call_of(*messages))
    assert isinstance(decision, Refuse)
    assert (decision.reason, decision.field) == ("INVALID_CALL", field)
    assert decision.text
    first = captured.decide(call_of(TASK))
    assert isinstance(first, Open)
    assert first.kind is SegmentKind.MAIN, "a refused call leaves nothing behind"


WITH_TEXT = called({"a": 3}, {"a": 5}, reasoning="Easy.") | {"content": "Adding."}


def test_an_answer_whose_text_was_dropped_is_put_back_as_sampled() -> None:
    """Several frameworks send nothing but the tool calls of an answer that has some."""
    captured = after_one_call(WITH_TEXT)
    sent = WITH_TEXT | {"content": None, "reasoning_content": None}
    call = call_of(SYSTEM, TASK, sent, result("8", "id1"), result("7", "id0"), user("On."), tools=(ADD,))
    assert isinstance(captured.sample(call, says("ok")), Continue)
    results = [result("8", "id1"), result("7", "id0")]
    assert captured.conversations == {0: [SYSTEM, TASK, WITH_TEXT, *results, user("On."), says("ok")]}
    assert captured.tree.settle().report.restored == 1


@pytest.mark.parametrize("text", ["Multiplying.", None])
def test_an_answer_with_another_text_or_other_ids_is_not_the_sampled_one(text: str | None) -> None:
    captured = after_one_call(WITH_TEXT)
    sent = WITH_TEXT if text else called({"a": 3}, {"a": 5}, ids=["x", "y"])
    decision = captured.decide(call_of(SYSTEM, TASK, sent | {"content": text}, user("On."), tools=(ADD,)))
    assert isinstance(decision, Open)


def test_with_the_history_as_the_template_has_it_an_answer_needs_its_text() -> None:
    captured = after_one_call(WITH_TEXT, CaptureOptions(history="as_template"))
    sent = WITH_TEXT | {"content": None}
    decision = captured.decide(call_of(SYSTEM, TASK, sent, result("8"), tools=(ADD,)))
    assert isinstance(decision, Open)


@pytest.mark.parametrize("names", [["reasoning_content", "content", "tool_calls[0]"], ["content", "tool_calls[0]"]])
def test_a_history_that_names_fields_of_a_completion_continues(names: list[str]) -> None:
    sampled = called({"a": 3}, reasoning="Easy.") | {"content": "Adding."}
    captured = after_one_call(sampled)
    named = [{"role": "assistant", "repeated_field": name} for name in names]
    ids = dict.fromkeys(range(2, 2 + len(names)), "completion-1")
    call = call_of(SYSTEM, TASK, *named, result("8"), ids=ids, tools=(ADD,))
    assert isinstance(captured.sample(call, says("8")), Continue)
    assert captured.conversations == {0: [SYSTEM, TASK, sampled, result("8"), says("8")]}


@pytest.mark.parametrize(
    ("name", "completion"),
    [
        ("content", "completion-9"),
        ("content", ""),
        ("tool_calls[1]", "completion-1"),
        ("reasoning_content", "completion-1"),
        ("audio", "completion-1"),
    ],
)
def test_a_field_that_no_completion_has_is_refused(name: str, completion: str) -> None:
    captured = after_one_call(called({"a": 3}))
    named = {"role": "assistant", "repeated_field": name}
    refused = captured.decide(call_of(SYSTEM, TASK, named, result("8"), ids={2: completion}, tools=(ADD,)))
    assert isinstance(refused, Refuse)
    assert (refused.reason, refused.field) == (UNKNOWN_COMPLETION, "messages[2]")
