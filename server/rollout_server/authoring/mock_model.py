"""A mock model for agents that have no model yet: it calls one tool and repeats the tool's result."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import jsonschema
from rollout_client import Tool

from rollout_server.authoring.validation import callable_tools
from rollout_server.testing.model.calculator import text_of
from rollout_server.testing.script import ScriptedReply, tool_call

_WORD: Final = re.compile(r"\w+")
_NUMBER: Final = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
_QUOTED: Final = re.compile(r"""["'“«]([^"'”»]+)["'”»]""")
# A capitalised word that does not begin a sentence.
_NAME: Final = re.compile(r"(?<=[^.!?\s]\s)[A-ZÀ-Þ]\w+")


class MockModel:
    """Answer each user message with one tool call, then with the text of its result. Without tools, repeat the message.

    It is no language model: it keeps no state and follows three rules. It calls the tool whose name and description share the most
    words with the message. String arguments are the quoted texts or else the capitalised words of the message, in order; numbers
    are its numbers. All other arguments are examples that the tool's schema allows.
    """

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        examples = dict(callable_tools(tools))
        self._tools = [(tool, examples[tool.name]) for tool in tools if tool.name in examples]

    def reply(self, messages: Sequence[Mapping[str, object]]) -> ScriptedReply:
        """Return the next completion."""
        last = max((index for index, message in enumerate(messages) if message.get("role") == "user"), default=-1)
        prompt = text_of(messages[last]) if last >= 0 else ""
        results = [text_of(message) for message in messages[last + 1 :] if message.get("role") == "tool"]
        if results:
            return ScriptedReply(content=results[-1] or "The tool returned no text.")
        if not self._tools:
            return ScriptedReply(content=prompt or "There is no user message.")
        words = set(_tokens_of(prompt))
        tool, example = max(
            self._tools, key=lambda each: len(words & set(_tokens_of(f"{each[0].name} {each[0].description}")))
        )
        arguments = _from_prompt(prompt, example, json.loads(tool.parameters_json_schema))
        return ScriptedReply(tool_calls=(tool_call(f"call_{len(messages)}", tool.name, arguments),))


def _tokens_of(text: str) -> Iterator[str]:
    return (word.lower() for word in _WORD.findall(text.replace("_", " ")))


def _from_prompt(prompt: str, example: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The example with strings and numbers from the prompt; the example alone where the schema does not allow those."""
    texts = iter(_QUOTED.findall(prompt) or _NAME.findall(prompt) or [prompt])
    numbers = (float(number) if "." in number else int(number) for number in _NUMBER.findall(prompt))
    arguments = dict(example)
    for name, value in example.items():
        if isinstance(value, str):
            arguments[name] = next(texts, value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            arguments[name] = next(numbers, value)
    return arguments if jsonschema.Draft202012Validator(schema).is_valid(arguments) else example
