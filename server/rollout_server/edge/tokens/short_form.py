"""A short conversation that ends as a long one does, and when a rollout has to prove it again (docs/design.md, R2).

What a template writes behind an answer nearly always depends on the system message, the tools, the last question and the answer
itself, and not on all that was said before. So the environment can be rendered behind a short history, at a cost that does not grow
with the conversation. Nothing guarantees this: a template may count messages, or look for a word in an early one. A short form is
therefore only used while it was compared, in the same rollout, with the full rendering of a conversation of the same shape.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import groupby
from operator import itemgetter
from typing import Final, TypeAlias

from rollout_server.core.message import JSON
from rollout_server.edge.tokens.chat_template import Literals
from rollout_server.edge.tokens.rendering_form import Fields, strings

_SYSTEM: Final = ("system", "developer")
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
_FIRST_TURNS: Final = 2
_EVERY: Final = 16
_MANY: Final = 3

Kind: TypeAlias = tuple[object, ...]
"""What a template can see of a message without looking at its text."""


def short_history(roles: Sequence[str], answered: int) -> list[int]:
    """The indices of the messages before the answer that are kept: the leading system messages and the last user message."""
    leading = 0
    while leading < answered and roles[leading] in _SYSTEM:
        leading += 1
    user = next((index for index in range(answered - 1, leading - 1, -1) if roles[index] == "user"), None)
    return [*range(leading), *([] if user is None else [user])]


def shortened(messages: Sequence[Fields], answered: int, filler: str) -> tuple[list[Fields], int]:
    """The kept history, the answer and all that follows it, and the index of the answer in this list.

    A history without a user message gets one with the text `filler`, because many templates refuse to start with an answer.
    """
    roles = [str(message.get("role")) for message in messages[:answered]]
    kept = [messages[index] for index in short_history(roles, answered)]
    if not any(message.get("role") == "user" for message in kept):
        kept.append({"role": "user", "content": filler})
    return [*kept, *messages[answered:]], len(kept)


class ShortFormProof:
    """Follows one conversation and says when its short form has to be compared with the full rendering before it is used.

    That is so in the first two turns with an environment, whenever the conversation has a shape that was not compared yet, and in
    every 16th turn. The shape is what a template can depend on without growing with each turn: the kinds of the answer and of the
    messages behind it, the kinds of messages that the short history drops, which strings of the template's own occur in messages of
    which role among these, behind the answer and in the user message that is kept, and which of its numbers the count of messages
    has passed. The strings of tool results only count when they come for the first time: their contents change in each turn. Of
    those in dropped system and user messages the order counts in which they came last, because the last one may be a switch.
    """

    def __init__(self, literals: Literals) -> None:
        self.usable = True
        self._literals = literals
        self._dropped: set[object] = set()
        self._latest: dict[tuple[str, str], int] = {}
        self._following: set[object] = set()
        self._looked_at = 0
        self._leading = 0
        self._user: Fields | None = None
        self._asked: frozenset[str] = frozenset()
        self._proved: set[object] = set()
        self._shape: object = None
        self._turns = 0
        self._since = 0

    def due(self, messages: Sequence[Fields], answered: int) -> bool:
        """Whether the short form of this turn has to be compared. To be called once for each turn behind an answer.

        `messages` is the whole conversation, and `answered` the index of the last answer in it.
        """
        self._turns, self._since = self._turns + 1, self._since + 1
        answer, following = messages[answered], messages[answered + 1 :]
        self._add_features(self._dropped, self._newly_dropped(messages, answered))
        self._add_features(self._following, following)
        self._looked_at = answered
        # Up to a number, at it and beyond it: a template may compare in any way.
        numbers, count = self._literals.numbers, len(messages)
        passed = bisect_left(numbers, count), bisect_right(numbers, count)
        said = frozenset(
            word for message in following if message.get("role") != "tool" for word in self._literals_in(message)
        )
        self._shape = (
            passed,
            self._order(),
            self._asked,
            said,
            _kind(answer, None),
            tuple(_kind(message, answer) for message in following),
        )
        return self._turns <= _FIRST_TURNS or self._since >= _EVERY or self._shape not in self._proved

    def equal(self) -> None:
        """The short form of this turn was the same as the full one."""
        self._proved.add(self._shape)
        self._since = 0

    def differs(self) -> None:
        """It was not: this rollout uses it no more."""
        self.usable = False

    def fork(self) -> ShortFormProof:
        """The proof of a conversation that goes on from here on its own."""
        other = copy(self)
        other._dropped, other._following = set(self._dropped), set(self._following)
        other._latest = dict(self._latest)
        other._proved = set(self._proved)
        return other

    def _newly_dropped(self, messages: Sequence[Fields], answered: int) -> Iterator[Fields]:
        """The messages that a short history kept in the turn before, or did not know, and does not keep any more."""
        for index in range(self._looked_at, answered):
            message = messages[index]
            if index == self._leading and message.get("role") in _SYSTEM:
                self._leading += 1
            elif message.get("role") == "user":
                if self._user is not None:
                    self._latest |= dict.fromkeys((("user", word) for word in self._asked), index)
                    yield self._user
                self._user, self._asked = message, self._literals_in(message)
            else:
                if (role := str(message.get("role"))) in _SYSTEM:
                    self._latest |= dict.fromkeys(((role, word) for word in self._literals_in(message)), index)
                yield message

    def _order(self) -> tuple[frozenset[tuple[str, str]], ...]:
        """The strings of dropped system and user messages in the order in which they came last."""
        latest = sorted(self._latest.items(), key=itemgetter(1))
        return tuple(frozenset(word for word, _ in group) for _, group in groupby(latest, key=itemgetter(1)))

    def _add_features(self, seen: set[object], messages: Iterable[Fields]) -> None:
        """Adds what is in the messages. What was proved before was proved for a conversation without anything new in this place."""
        found = {feature for message in messages for feature in self._features(message)}
        if not found <= seen:
            seen |= found
            self._proved.clear()

    def _features(self, message: Fields) -> Iterator[object]:
        kind = _kind(message, None)
        yield kind
        yield from ((kind[0], word) for word in self._literals_in(message))

    def _literals_in(self, message: Fields | None) -> frozenset[str]:
        """The template's strings that occur in a message."""
        texts = [] if message is None else list(strings(message))
        return frozenset(word for word in self._literals.strings if any(word in text for text in texts))


def _kind(message: Fields, answer: Fields | None) -> Kind:
    """Role, kinds of content and reasoning, calls and names of fields; of a tool result also whether `answer` called it."""
    calls = message.get("tool_calls")
    linked = answer is not None and message.get("tool_call_id") in _call_ids(answer)
    thoughts = tuple(_content_kind(message.get(name)) for name in _REASONING)
    arguments = tuple(_arguments_kind(call) for call in (calls if isinstance(calls, list) else [])[:_MANY])
    return (
        str(message.get("role")),
        _content_kind(message.get("content")),
        thoughts,
        arguments,
        frozenset(message),
        linked,
    )


def _content_kind(content: JSON) -> str:
    if isinstance(content, str):
        return "text" if content.strip() else "blank" if content else "empty"
    if isinstance(content, list):
        return f"{min(len(content), _MANY)} parts"
    return type(content).__name__


def _arguments_kind(call: JSON) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    return f"{type(arguments).__name__}{min(len(arguments), 1) if isinstance(arguments, str | Mapping) else ''}"


def _call_ids(answer: Fields) -> Sequence[JSON]:
    calls = answer.get("tool_calls")
    return [call.get("id") for call in (calls if isinstance(calls, list) else []) if isinstance(call, Mapping)]
