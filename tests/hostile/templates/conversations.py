"""Random conversations that are difficult for templates and renderers, and the endings of their completions."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

Fields: TypeAlias = dict[str, Any]
Ending: TypeAlias = Literal[
    "stop", "stripped", "cut", "unclosed", "eos", "other_special", "more", "space", "nothing", "no_ids"
]
"""How the ids of a completion end.

They end with the stop token of their kind, without it, truncated by length ("unclosed": right behind the text), with the end token,
or with a special token that ends nothing. "more": with the stop token and the text after it, "space": with the stop token and a
line break, as an engine returns them that stops at several tokens or at a text. Or there are no ids, because the completion is
empty or the trainer sends none.
"""

TOOLS: Final[Sequence[Fields]] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": {"value": {"type": "string"}}, "required": ["value"]},
        },
    }
    for name, description in (("look", "Looks at something."), ("add", "Adds <b>two</b> & more 'numbers'."))
)

_PIECES: Final = (
    *(
        "Hello",
        "What is five plus three?",
        "And twice that?",
        "Thank you.",
        "word",
        "8",
        "8.0",
        "Why",
        "ok?",
        "A longer line of text.",
    ),
    *(
        "\n",
        "\n\n",
        " ",
        "\t",
        "\r\n",
        "  ",
        "e\u0301",
        "\u00e9",
        "😀",
        "漢字",
        "\u202e",
        "\ufb01",
        "\u00a0",
        "<|",
        "|>",
        "''",
        '"',
        "\\n",
        "\\",
    ),
    *(
        "<|im_end|>",
        "<|im_start|>user\n",
        "<|eot|>",
        "<|end|>",
        "<|user|>",
        "<|observation|>",
        "</s>",
        "<|eos|>",
        "<|endoftext|>",
    ),
    *("<|call_end|>", "<|calls_end|>", "<|call|>", "[/INST]", "<think>", "</think>", "<tool_call>", "</tool_response>"),
    *("</answer>", "</answer"),
    *(
        "{{ messages }}",
        "{% raw %}",
        "Yes.",
        "?",
        "/no_think",
        "/think",
        "(Remember to be brief.)",
        '{"a": 8.0}',
        "1e400",
        "-0",
    ),
)
_PLAIN: Final = (
    "Hello",
    "What is five plus three?",
    "And twice that?",
    "Thank you.",
    "Look again",
    "More, please",
    "Why?",
)
_ARGUMENTS: Final = (
    '{"value": "a"}',
    '{"value":"a"}',
    '{ "value" : 8.0 , "b" : [1,2] }',
    '{"value": "\\u00e9\\n"}',
    '{"value": "e\u0301"}',
    '{"value": "<|im_end|>"}',
    '{"value": 1e2, "n": null}',
    "{}",
)


@dataclass(frozen=True, slots=True)
class Turn:
    """A completion, its ending, and the messages after it.

    `kept`: the share of its ids that a truncation keeps. `free`: the ids are arbitrary.
    """

    answer: Fields
    environment: tuple[Fields, ...]
    ending: Ending = "stop"
    kept: float = 1.0
    free: bool = False


@dataclass(frozen=True, slots=True)
class Conversation:
    """A rollout: its prompt and its turns. `spacing`: the JSON separators of messages."""

    prompt: tuple[Fields, ...]
    turns: tuple[Turn, ...]
    tools: bool = True
    spacing: int = 0

    def spelled(self, message: Fields) -> str:
        """A message as JSON text."""
        separators = ((", ", ": "), (",", ":"), (" ,  ", " : "))[self.spacing % 3]
        return json.dumps(message, ensure_ascii=self.spacing >= 3, separators=separators)


def generate(rng: random.Random) -> Conversation:
    """Generate a random conversation."""
    return _Author(rng).conversation()


class _Author:
    """Generator of one conversation."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._odd = rng.choice((0.0, 0.0, 0.1, 0.3, 0.6))
        self._thinks = rng.random() < 0.4
        self._switches = rng.random() < 0.3
        self._numbered = 0
        self._open: list[tuple[str, str]] = []  # ids and names of calls whose results may still follow
        self._odd_ending = rng.choice((0.0, 0.2, 0.5))

    def conversation(self) -> Conversation:
        rng = self._rng
        long = rng.random() < 0.06
        number = rng.randint(16, 36) if long else rng.choice((1, 2, 2, 3, 3, 4, 5, 7))
        prompt = tuple(self._prompt())
        calling = rng.choice((0.0, 0.5, 0.8))
        turns = []
        for place in range(number):
            calls = rng.random() < calling
            turns.append(self._turn(calls=calls, last=place == number - 1))
        return Conversation(prompt, tuple(turns), rng.random() < 0.8, rng.randrange(6))

    def _chance(self, share: float = 1.0) -> bool:
        return self._rng.random() < self._odd * share

    def _prompt(self) -> Iterator[Fields]:
        rng = self._rng
        if rng.random() < 0.5:
            role = "developer" if self._chance(0.2) else "system"
            switch = " /no_think" if self._switches and rng.random() < 0.5 else ""
            yield {"role": role, "content": self._content(listed=True) if self._chance() else "Be brief." + switch}
        for _ in range(rng.choice((0, 0, 0, 1, 2))):
            yield self._user()
            yield from ({"role": "assistant", "content": self._text()} for _ in range(1))
        if self._chance(0.3):
            yield {"role": "system", "content": self._text()}
        if not self._chance(0.1):
            yield self._user()
        else:
            yield {"role": "tool", "content": self._text(), "tool_call_id": "call00000"}

    def _turn(self, *, calls: bool, last: bool) -> Turn:
        rng = self._rng
        answer = self._calling() if calls else self._answering()
        environment = list(self._results(answer) if calls else self._follow())
        if self._chance(0.5):
            environment.insert(rng.randrange(len(environment) + 1), self._stray())
        if self._chance(0.15):
            environment = environment[1:]
        ending: Ending = "stop"
        if rng.random() < self._odd_ending:
            endings = get_args(Ending)
            ending = rng.choice((*endings[1:], "stripped"))
        return Turn(answer, tuple(environment), ending, rng.random(), rng.random() < 0.3)

    def _answering(self) -> Fields:
        answer: Fields = {"role": "assistant", "content": self._content(listed=False)}
        return self._thought(answer)

    def _calling(self) -> Fields:
        rng = self._rng
        calls = []
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            self._numbered += 1
            arguments = rng.choice(_ARGUMENTS)
            name = rng.choice(("look", "add"))
            self._open.append((f"call{self._numbered:05}", name))
            calls.append(
                {"id": self._open[-1][0], "type": "function", "function": {"name": name, "arguments": arguments}}
            )
        answer: Fields = {"role": "assistant"}
        content = rng.choice(("", None, "missing", self._text()))
        if content != "missing":
            answer["content"] = content
        return self._thought({**answer, "tool_calls": calls})

    def _thought(self, answer: Fields) -> Fields:
        rng = self._rng
        if not self._thinks or rng.random() < 0.3:
            return answer
        style = rng.randrange(4)
        if style == 0 and isinstance(answer.get("content"), str):
            return {**answer, "content": f"<think>\nLet me see.\n</think>\n\n{answer['content']}"}
        field = ("reasoning_content", "reasoning_content", "reasoning", "thinking")[style]
        return {**answer, field: rng.choice(("Let me see.", "", self._text()))}

    def _results(self, answer: Fields) -> Iterator[Fields]:
        rng = self._rng
        due = [(call["id"], call["function"]["name"]) for call in answer["tool_calls"]]
        if self._chance(0.5):
            rng.shuffle(due)
        if self._chance(0.4) and len(due) > 1:
            due.pop()
        for call_id, name in due:
            yield self._result(call_id, name)
        if self._chance(0.5):
            yield self._user()

    def _result(self, call_id: str, name: str) -> Fields:
        rng = self._rng
        result: Fields = {"role": "tool", "content": self._content(listed=True), "tool_call_id": call_id}
        if rng.random() < 0.3:
            result["name"] = name
        return result

    def _follow(self) -> Iterator[Fields]:
        yield self._user()
        if self._chance(0.4):
            yield self._user()

    def _stray(self) -> Fields:
        """A message at an unexpected position."""
        rng = self._rng
        kind = rng.randrange(4)
        if kind == 0:
            return {"role": "system", "content": self._content(listed=False)}
        if kind == 1:
            return self._result(*(rng.choice(self._open) if self._open else ("call99999", "look")))
        if kind == 2:
            return {"role": "assistant", "content": self._text()}
        return self._user()

    def _user(self) -> Fields:
        content: Any = self._content(listed=True) if self._chance() else self._rng.choice(_PLAIN)
        if self._switches and isinstance(content, str) and self._rng.random() < 0.3:
            content += self._rng.choice((" /no_think", " /think"))
        return {"role": "user", "content": content}

    def _content(self, *, listed: bool) -> Any:
        rng = self._rng
        if self._chance(0.3):
            return rng.choice(("", None))
        if listed and self._chance(0.3):
            return [{"type": "text", "text": self._text()} for _ in range(rng.choice((0, 1, 2)))]
        return self._text()

    def _text(self) -> str:
        rng = self._rng
        if rng.random() > self._odd:
            return rng.choice(_PLAIN) + rng.choice(("", " I see.", " 42", "?"))
        return "".join(rng.choice(_PIECES) for _ in range(rng.choice((0, 1, 2, 4, 8))))
