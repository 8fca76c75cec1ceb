"""A model as a reward function: it reads question, answer and response, and its reply is parsed to a score."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from rollout_server.core.message import JSON
from rollout_server.core.outcome import Category, Failure
from rollout_server.runtime.errors import ModelFailed
from rollout_server.runtime.run.messages import text_of
from rollout_server.runtime.run.run import Run

Parser: TypeAlias = Callable[[str], float]
"""Returns the score in a judge's reply. Raises ValueError with an instruction for the judge, such as "end with a number"."""

PROMPT: Final = """Question:
{question}

Reference answer:
{answer}

Response:
{response}

Is the response correct, measured by the reference answer? Reply with yes or no."""

_PLACEHOLDER: Final = re.compile(r"\{(question|answer|response)\}")
_YES_NO: Final = re.compile(r"\b(yes|no)\b", re.IGNORECASE)
# A minus sign, an en dash or a non-breaking hyphen in front of a number, but not one between two, as in "1–5".
_MINUS: Final = re.compile(r"(?<![\w.])[−–‑](?=\d)")
_NUMBER: Final = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w%]|\.\d)")


def yes_or_no(reply: str) -> float:
    """Return 1.0 if the reply's last line has the word yes, 0.0 if it has the word no. Raises ValueError for both or neither."""
    found = {word.lower() for word in _YES_NO.findall(_last_line(reply))}
    if len(found) != 1:
        raise ValueError("end with a line that says yes or no")
    return float(found == {"yes"})


def number_from(low: float, high: float) -> Parser:
    """Return a parser for a reply whose last line has one number from `low` to `high`, such as "Score: 7" or "7/10"."""

    def parse(reply: str) -> float:
        line = re.sub(rf"\s*(?:/|out of)\s*{re.escape(f'{high:g}')}(?!\.?\d)", "", _last_line(reply))
        numbers = [float(text) for text in _NUMBER.findall(_MINUS.sub("-", line))]
        if len(numbers) != 1 or not low <= numbers[0] <= high:
            raise ValueError(f"end with a line that has one number from {low:g} to {high:g}")
        return numbers[0]

    return parse


def json_field(name: str, low: float = 0.0, high: float = 1.0) -> Parser:
    """Return a parser for a reply with one JSON object, whose field `name` is true, false or a number from `low` to `high`."""

    def parse(reply: str) -> float:
        start, stop = reply.find("{"), reply.rfind("}")
        try:
            value = json.loads(reply[start : stop + 1]).get(name) if 0 <= start < stop else None
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, int | float) or not low <= value <= high:
            raise ValueError(f'reply with one JSON object whose "{name}" is a number from {low:g} to {high:g}')
        return float(value)

    return parse


@dataclass(frozen=True)
class Judge:
    """A reward function for a `Rubric` that asks a further model: `Rubric(funcs=[exact, Judge()], weights=[1.0, 0.5])`.

    The score is the number that the parser returns, unscaled. If the parser finds no score, the model is told what is missing, up
    to `attempts` replies; then it raises `ModelFailed`.

    Args:
        model: name of the model, as for `run.model`.
        prompt: text of the user message. {question} is replaced by the last user message of the request, {answer} by the
            metadata's answer, {response} by the text of the model's last message. It must have {response}.
        parser: `yes_or_no`, `number_from(low, high)`, `json_field(name, low, high)`, or any function that returns the score in a
            text and raises ValueError if there is none.
        name: name of the score; by default that of the model.
        sampling: sampling parameters, as for `run.model(...).sample`.
        attempts: maximum number of replies.
    """

    model: str = "judge"
    prompt: str = PROMPT
    parser: Parser = yes_or_no
    name: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    attempts: int = 3

    def __post_init__(self) -> None:
        """Raises ValueError for `attempts` below 1, and for a prompt that does not show the response."""
        if self.attempts < 1:
            raise ValueError(f"Judge: attempts is {self.attempts}; it must be at least 1")
        if "{response}" not in self.prompt:
            known = "{question}, {answer} and {response}"
            raise ValueError(
                f"Judge: the prompt has no {{response}}, so the model could not see it; it may have {known}"
            )
        object.__setattr__(self, "name", self.name or self.model)

    async def __call__(self, run: Run, prompt: Sequence[Mapping[str, JSON]], response: str, answer: JSON) -> float:
        """Return the model's score of a rollout. Raises `ModelFailed`, also if no reply has a score."""
        questions = [text_of(message.get("content")) for message in prompt if message.get("role") == "user"]
        parts = {
            "question": questions[-1] if questions else "",
            "answer": "(none)" if answer is None else str(answer),
            "response": response,
        }
        messages: list[Mapping[str, JSON]] = [
            {"role": "user", "content": _PLACEHOLDER.sub(lambda found: parts[found[1]], self.prompt)}
        ]
        model, lacks = run.model(self.model), ""
        for _ in range(self.attempts):
            reply = await model.sample(messages, **self.sampling)
            try:
                return self.parser(reply.content)
            except ValueError as error:
                lacks = f"(finish_reason {reply.finish_reason!r}) must {error!s:.300}"
                messages += [
                    {"role": "assistant", "content": reply.content},
                    {"role": "user", "content": f"No score can be read from this reply. Please {error!s:.300}."},
                ]
        text = f"model {self.model!r}, in turn {run.turn}: no score in {self.attempts} replies; the last one {lacks}"
        raise ModelFailed(Failure(Category.ENGINE_CLIENT, text, run.turn))


def _last_line(text: str) -> str:
    return text.rstrip().rpartition("\n")[2]
