"""The mock model: one tool call with arguments from the message, then the tool's result."""

import json
from typing import Any

import pytest
from rollout_client import Tool
from rollout_server.authoring.mock_model import MockModel

TEXT = {"type": "string"}


def made_tool(name: str, description: str = "", **properties: Any) -> Tool:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return Tool(name=name, description=description, parameters_json_schema=json.dumps(schema))


WEATHER = made_tool("temperature", "Temperature of a city.", city=TEXT)
ADD = made_tool("add", "Adds two numbers.", a={"type": "number"}, b={"type": "integer"})


def asked(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def call(model: MockModel, *messages: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    (found,) = model.reply(messages).tool_calls
    function: Any = found["function"]
    return function["name"], dict(function["arguments"])


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ("How warm is it in Zürich?", "temperature", {"city": "Zürich"}),
        ("What is the temperature of 'New York', please?", "temperature", {"city": "New York"}),
        ("temperature?", "temperature", {"city": "temperature?"}),
        ("Which numbers: 2.5 and 7?", "add", {"a": 2.5, "b": 7}),
        # 2.5 is no integer: the schema refuses it, so the example is used as a whole.
        ("Which numbers: 7 and 2.5?", "add", {"a": 1, "b": 1}),
        ("Two numbers, please", "add", {"a": 1, "b": 1}),
        ("Which numbers, at 09:30?", "add", {"a": 9, "b": 30}),  # JSON has no leading zeros
        ("Which numbers: ٧ and -007.50 and 3?", "add", {"a": -7.5, "b": 3}),
    ],
)
def test_the_tool_and_its_arguments_come_from_the_message(text: str, name: str, arguments: dict[str, Any]) -> None:
    assert call(MockModel([WEATHER, ADD]), asked(text)) == (name, arguments)


def test_the_result_is_the_completion_and_the_next_message_begins_anew() -> None:
    model = MockModel([WEATHER])
    talk = [asked("In Zürich?"), {"role": "assistant", "tool_calls": []}, {"role": "tool", "content": "21.5"}]
    assert model.reply(talk).content == "21.5"
    assert call(model, *talk, {"role": "assistant", "content": "21.5"}, asked("And in Bern?")) == (
        "temperature",
        {"city": "Bern"},
    )
    assert model.reply([*talk[:2], {"role": "tool", "content": ""}]).content == "The tool returned no text."


def test_arguments_that_the_prompt_does_not_hold_are_examples_of_the_schema() -> None:
    tool = made_tool(
        "paint", colour={"type": "string", "enum": ["red", "blue"]}, coats={"type": "integer", "minimum": 2}
    )
    assert call(MockModel([tool]), asked("Paint the Kitchen")) == ("paint", {"colour": "red", "coats": 2})


def test_without_tools_the_message_is_repeated() -> None:
    assert MockModel().reply([asked("one"), {"role": "assistant", "content": "two"}]).content == "one"
    assert MockModel().reply([{"role": "system", "content": "Be kind."}]).content == "There is no user message."
    unusable = Tool(name="broken", parameters_json_schema="{")
    assert MockModel([unusable]).reply([asked("one")]).tool_calls == ()
