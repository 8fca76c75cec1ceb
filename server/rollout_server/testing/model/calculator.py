"""The default model of the strict trainer, used where no script is set."""

import json
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from rollout_server.testing.model.arithmetic import Number, Operation, number, operations
from rollout_server.testing.script import ScriptedReply, tool_call

_MARK: Final = "####"
_INFIX: Final = {"add": "plus", "subtract": "minus", "multiply": "times", "divide": "divided by"}
_GERUND: Final = {
    "add": "Adding {b} to {a}",
    "subtract": "Subtracting {b} from {a}",
    "multiply": "Multiplying {a} by {b}",
    "divide": "Dividing {a} by {b}",
}


class Model(Protocol):
    """A model for the strict trainer. It runs in the trainer's own thread."""

    def reply(self, messages: Sequence[Mapping[str, object]]) -> ScriptedReply:
        """Return the completion of a conversation."""
        ...


class CalculatorModel:
    """Solves the arithmetic in the last user message with the calculator's tools, one call per turn.

    It is stateless and deterministic: each completion depends only on the messages. An operand that refers to a result is taken
    from the tool message. The last completion contains the whole calculation, and ends with ``#### RESULT`` if the system or a user
    message mentions that form. If there is nothing to calculate, the completion says so.
    """

    def reply(self, messages: Sequence[Mapping[str, object]]) -> ScriptedReply:
        """Return the next completion: a tool call or a final text."""
        start = max((i for i, message in enumerate(messages) if message.get("role") == "user"), default=None)
        plan = operations(text_of(messages[start])) if start is not None else ()
        if start is None or not plan:
            return ScriptedReply(content="Hello! There is nothing to calculate here.")
        tool_texts = [text_of(message) for message in messages[start:] if message.get("role") == "tool"]
        results = [number(text) for text in tool_texts]
        if None in results:
            return ScriptedReply(content=f"I could not finish the calculation. {tool_texts[results.index(None)]}")
        known = [result for result in results if result is not None]
        if len(known) < len(plan):
            calls = sum(message.get("role") == "tool" for message in messages)
            return _call_reply(plan[len(known)], known, call_id=f"call_{calls + 1}")
        return ScriptedReply(content=_final_text(plan, known, marked=_wants_mark(messages)))


def text_of(message: Mapping[str, object]) -> str:
    """Return the text of a message's content: the string, or the joined text parts of a list; empty if there is none."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str))


def _call_reply(operation: Operation, known: Sequence[Number], call_id: str) -> ScriptedReply:
    a, b = _operands(operation, known)
    content = "Continuing the calculation." if known else "I'll calculate that for you."
    return ScriptedReply(
        content=content, tool_calls=(tool_call(call_id, operation.name, json.dumps({"a": a, "b": b})),)
    )


def _operands(operation: Operation, known: Sequence[Number]) -> tuple[Number, Number]:
    a, b = (known[-1] if operand is None else operand for operand in (operation.a, operation.b))
    return a, b


def _final_text(plan: Sequence[Operation], known: Sequence[Number], *, marked: bool) -> str:
    sentences = []
    for index, operation in enumerate(plan):
        a, b = _operands(operation, known[:index])
        if index == 0:
            sentences.append(f"{a} {_INFIX[operation.name]} {b} equals {known[index]}.")
        else:
            sentences.append(f"{_GERUND[operation.name].format(a=a, b=b)} gives {known[index]}.")
    text = " ".join(sentences)
    return f"{text}\n{_MARK} {known[len(plan) - 1]}" if marked else text


def _wants_mark(messages: Sequence[Mapping[str, object]]) -> bool:
    return any(message.get("role") in ("system", "user") and _MARK in text_of(message) for message in messages)
