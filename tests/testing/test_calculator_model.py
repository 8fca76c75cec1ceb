"""The default scripted model: parsing of questions, and the steps of a calculation."""

import json
from typing import Any

import pytest
from rollout_server.testing.model.arithmetic import Operation, number, operations
from rollout_server.testing.model.calculator import CalculatorModel
from rollout_server.testing.script import ScriptedReply


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Please calculate 5 plus 3, and then multiply the result by 2.", [("add", 5, 3), ("multiply", None, 2)]),
        ("Add 5 and 3.", [("add", 5, 3)]),
        ("Subtract 2 from 10 and divide it by -4", [("subtract", 10, 2), ("divide", None, -4)]),
        ("What is 12 times 7?", [("multiply", 12, 7)]),
        ("5-3", [("subtract", 5, 3)]),
        ("-5 - -3", [("subtract", -5, -3)]),
        (
            "100 divided by 8 minus 2.5; then add 7 to it",
            [("divide", 100, 8), ("subtract", None, 2.5), ("add", None, 7)],
        ),
        ("1,000 multiplied by 2", [("multiply", 1000, 2)]),
        ("What is the result of 5 plus 3?", [("add", 5, 3)]),
        ("20 over 4, then subtract the result from 100", [("divide", 20, 4), ("subtract", 100, None)]),
        ("the sum of 1, 2 and 3", [("add", 1, 2), ("add", None, 3)]),
        ("the product of 4 and 5 plus 2", [("multiply", 4, 5), ("add", None, 2)]),
        ("5 + 3 * 2 ÷ 4", [("add", 5, 3), ("multiply", None, 2), ("divide", None, 4)]),
        ("2 x 3", [("multiply", 2, 3)]),
        ("1e300 plus 1", [("add", 1e300, 1)]),
        ("5 plus 3 and then times the result", [("add", 5, 3), ("multiply", None, None)]),
        ("Say hello.", []),
        ("multiply by 2", []),
        ("add, then divide", []),
        ("Add 5 to it.", []),
        ("Divide 1, 2 and 3.", []),
        ("Room 5, floor 3", []),
        ("", []),
    ],
)
def test_sentences(text: str, found: list[tuple[str, Any, Any]]) -> None:
    assert operations(text) == tuple(Operation(*each) for each in found)
    assert [(type(o.a), type(o.b)) for o in operations(text)] == [(type(a), type(b)) for _, a, b in found]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("-3", -3),
        ("8.0", 8.0),
        ("1e+300", 1e300),
        ("nan", None),
        ("inf", None),
        ("Error: x", None),
        ("", None),
    ],
)
def test_numbers(text: str, value: object) -> None:
    assert number(text) == value
    assert type(number(text)) is type(value)


def play(question: list[dict[str, Any]], *results: str) -> list[ScriptedReply]:
    """The model's replies; each is followed by the next of `results`."""
    messages, replies = list(question), []
    for result in (*results, None):
        replies.append(CalculatorModel().reply(messages))
        messages.append(replies[-1].message)
        if result is not None:
            messages.append({"role": "tool", "content": result, "tool_call_id": "x"})
    return replies


def calls(replies: list[ScriptedReply]) -> list[tuple[str, str, Any]]:
    return [
        (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
        for reply in replies
        for call in reply.tool_calls
    ]


QUESTION = {"role": "user", "content": "Please calculate 5 plus 3, and then multiply the result by 2."}


def test_a_calculation_takes_each_result_from_the_tool() -> None:
    replies = play([QUESTION], "80", "160")
    assert calls(replies) == [("call_1", "add", {"a": 5, "b": 3}), ("call_2", "multiply", {"a": 80, "b": 2})]
    assert replies[-1].message == {
        "role": "assistant",
        "content": "5 plus 3 equals 80. Multiplying 80 by 2 gives 160.",
    }


@pytest.mark.parametrize("role", ["system", "user"])
def test_the_marked_form_is_used_where_it_is_asked_for(role: str) -> None:
    form = {"role": role, "content": "End with '#### RESULT'."}
    assert play([form, QUESTION], "8", "16")[-1].content == ("5 plus 3 equals 8. Multiplying 8 by 2 gives 16.\n#### 16")


def test_all_four_operations_are_told_in_words() -> None:
    question = {"role": "user", "content": "Divide 9 by 3, then add 4, then subtract 2, then multiply it by 2."}
    assert play([question], "3.0", "7.0", "5.0", "10.0")[-1].content == (
        "9 divided by 3 equals 3.0. Adding 4 to 3.0 gives 7.0. Subtracting 2 from 7.0 gives 5.0. "
        "Multiplying 5.0 by 2 gives 10.0."
    )


def test_a_tool_that_failed_ends_the_calculation() -> None:
    replies = play([{"role": "user", "content": "1 divided by 0, then add 1"}], "Error: Division by zero")
    assert replies[-1].content == "I could not finish the calculation. Error: Division by zero"
    assert replies[-1].tool_calls == ()


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "Say hello."}],
        [{"role": "system", "content": "5 plus 3"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "image_url"}, 5]}],
    ],
)
def test_with_nothing_to_calculate_it_says_so(messages: list[dict[str, Any]]) -> None:
    assert CalculatorModel().reply(messages) == ScriptedReply(content="Hello! There is nothing to calculate here.")


def test_a_list_of_parts_is_read_and_a_second_question_starts_over() -> None:
    first = {"role": "user", "content": [{"type": "text", "text": "Add 5 "}, {"type": "text", "text": "and 3"}]}
    replies = play([first], "8")
    assert calls(replies) == [("call_1", "add", {"a": 5, "b": 3})]
    asked = [first, replies[0].message, {"role": "tool", "content": "8"}, replies[1].message, QUESTION]
    assert calls(play(asked))[0] == ("call_2", "add", {"a": 5, "b": 3})
