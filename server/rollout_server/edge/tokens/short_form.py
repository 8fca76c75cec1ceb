"""Render the environment after a short history, and decide when a rollout must verify that result (docs/design.md, R2 and D23).

The text that a template writes after a completion usually depends only on the system message, the tools, the last user message
and the completion. So the environment can be rendered after a short conversation, at a cost that does not grow with the
history. A template may break this: it may count messages, or search early messages for a word. A short form is therefore used
only after it was compared, in the same rollout, with the full rendering of a conversation of the same shape.

Equal texts alone do not show that the dropped messages have no influence: they may resemble the kept ones, or a count may not have
reached its limit yet. The first and the last question may have the same length, for example, and the template prints the length of
the first. So the comparison also renders the conversation with other texts in the dropped messages, and with the dropped round
repeated (`ShortFormProof.variations`), and the environment must stay the same.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import groupby
from math import lcm
from operator import itemgetter
from typing import Final, TypeAlias

from rollout_server.core.message import JSON
from rollout_server.edge.tokens.chat_template import REASONING, Literals
from rollout_server.edge.tokens.rendering_form import Fields, strings
from rollout_server.edge.tokens.turn_boundary import new_mark

_SYSTEM: Final = ("system", "developer")
_FIRST_TURNS: Final = 2
_EVERY: Final = 16
_MANY: Final = 3
_LONGEST_TEXT: Final = 4096
_MOST_COPIES: Final = 64
"""In messages. Higher counts are compared when a rollout reaches them."""
_CALLS: Final = "calls"
"""Under this name tool calls are counted among the roles."""

Kind: TypeAlias = tuple[object, ...]
"""The properties of a message that a template can test without reading its text."""
_Found: TypeAlias = tuple[str, bool, bool, bool]
"""A literal in a text, whether the text begins and ends with it, apart from white space, and whether case was ignored."""


def short_history(roles: Sequence[str], answered: int) -> list[int]:
    """Return the indices of the messages kept before the completion: leading system messages and the last user message."""
    leading = 0
    while leading < answered and roles[leading] in _SYSTEM:
        leading += 1
    user = next((index for index in range(answered - 1, leading - 1, -1) if roles[index] == "user"), None)
    return [*range(leading), *([] if user is None else [user])]


def shortened(messages: Sequence[Fields], answered: int, filler: str) -> tuple[list[Fields], int]:
    """Return the short conversation, and the index of the completion in it.

    The short conversation is the kept history, the completion (`messages[answered]`) and all messages after it. If the history
    has no user message, one with the text `filler` is added, because many templates refuse a conversation that starts with the
    assistant.
    """
    roles = [_role(message) for message in messages[:answered]]
    kept = [messages[index] for index in short_history(roles, answered)]
    if not any(message.get("role") == "user" for message in kept):
        kept.append({"role": "user", "content": filler})
    return [*kept, *messages[answered:]], len(kept)


class ShortFormProof:
    """Decide for one conversation when its short form must be compared with the full rendering before use.

    A comparison is due in the first two turns with an environment, for each new shape of the conversation, and in every 16th
    turn. The shape contains what a template can depend on without growing in each turn:

    - the kinds of the message before the completion, of the completion, and of the messages after it;
    - the kinds of the messages that the short history drops;
    - which string literals of the template occur in which role, and whether a text begins or ends with them: among the dropped
      messages, after the completion, and in the kept user message;
    - which integer literals of the template the number of messages has reached or passed: of all, of each role, and of tool calls;
    - whether a dropped text is longer than an integer literal that the texts of `variations` do not reach;
    - the number of messages of each role, and of tool calls, modulo each constant that the template divides by.

    Literals in tool results count only when they occur for the first time, because the content of tool results changes in each
    turn. For dropped system and user messages the order of last occurrence also counts, because a template may obey the last
    one of several switches (such as `/think` and `/no_think`).
    """

    def __init__(self, literals: Literals) -> None:
        self.usable = True
        self._literals = literals
        self._dropped: set[object] = set()
        self._latest: dict[tuple[str, _Found], int] = {}
        self._roles: Counter[str] = Counter()
        self._following: set[object] = set()
        self._looked_at = 0
        self._round = 0
        self._leading = 0
        self._user: Fields | None = None
        self._asked: frozenset[_Found] = frozenset()
        self._proved: set[object] = set()
        self._shape: object = None
        self._turns = 0
        self._since = 0

    def due(self, messages: Sequence[Fields], answered: int) -> bool:
        """Return whether the short form of this turn must be compared. Call this exactly once per turn that follows a completion.

        Args:
            messages: the whole conversation.
            answered: the index of the last completion in it.
        """
        self._turns, self._since = self._turns + 1, self._since + 1
        completion, following = messages[answered], messages[answered + 1 :]
        self._add_features(self._dropped, self._newly_dropped(messages, answered))
        self._add_features(self._following, following)
        self._round, self._looked_at = self._looked_at, answered
        # Below, equal to or above each number: a template may use any comparison operator.
        numbers, count = self._literals.numbers, len(messages)
        roles = self._roles + _counted(messages[answered:])
        passed = frozenset(
            (role, bisect_left(numbers, n), bisect_right(numbers, n)) for role, n in (("", count), *roles.items())
        )
        residues = tuple(
            frozenset((role, n % divisor) for role, n in roles.items()) for divisor in self._literals.divisors
        )
        following_literals = frozenset(
            word for message in following if message.get("role") != "tool" for word in self._literals_in(message)
        )
        self._shape = (
            passed,
            residues,
            self._order(),
            self._asked,
            following_literals,
            _kind(messages[answered - 1], None) if answered else None,
            _kind(completion, None),
            tuple(_kind(message, completion) for message in following),
        )
        return self._turns <= _FIRST_TURNS or self._since >= _EVERY or self._shape not in self._proved

    def variations(self, messages: Sequence[Fields], answered: int) -> Iterator[Sequence[list[Fields]]]:
        """Yield conversations that differ in the messages that the short history drops. The environment must be the same in all.

        Each is a list of alternatives: the first one counts that the template does not refuse. Dropped messages have their own
        texts, short ones, or long ones, because a template may compare lengths with the numbers in it. Blank texts stay, because
        many templates test whether there is a text. The last round that is dropped is repeated in two of three, because a template
        may count anything in it.
        """
        longest = min(max(self._literals.numbers, default=0), _LONGEST_TEXT)
        mark, times = new_mark(), self._times(messages, answered)
        kept = {*short_history([_role(message) for message in messages[:answered]], answered)}
        for text in ("", "q", mark * (1 + longest // len(mark))):
            all_other = [_with_text(each, text) if text else each for each in messages[:answered]]
            other = [messages[index] if index in kept else each for index, each in enumerate(all_other)]
            copies = [] if text == "q" else all_other[self._round :] * times
            repeated = [*other[: self._round], *copies, *other[self._round :], *messages[answered:]]
            plain = [*other, *messages[answered:]]
            yield ([repeated] if copies else []) + ([plain] if text else [])

    def _times(self, messages: Sequence[Fields], answered: int) -> int:
        """Return how many copies of the last round to insert: counts exceed the template's numbers and keep their residues.

        0 if the round does not begin with a completion, as it must to be repeated, or if it is too long.
        """
        size, step = answered - self._round, lcm(*self._literals.divisors)
        if size == 0 or _role(messages[self._round]) != "assistant" or size * step > _MOST_COPIES:
            return 0
        highest = max((number for number in self._literals.numbers if size * number <= _MOST_COPIES), default=1)
        return step * min(1 + highest // step, _MOST_COPIES // (size * step))

    def equal(self) -> None:
        """Record that the short form of this turn equals the full rendering."""
        self._proved.add(self._shape)
        self._since = 0

    def differs(self) -> None:
        """Record that they differ: the rollout stops using the short form."""
        self.usable = False

    def fork(self) -> ShortFormProof:
        """Return an independent copy for a forked conversation."""
        other = copy(self)
        other._dropped, other._following = set(self._dropped), set(self._following)
        other._latest, other._roles = dict(self._latest), Counter(self._roles)
        other._proved = set(self._proved)
        return other

    def _newly_dropped(self, messages: Sequence[Fields], answered: int) -> Iterator[Fields]:
        """Yield the messages that the short history of this turn drops for the first time."""
        for index in range(self._looked_at, answered):
            message = messages[index]
            self._roles += _counted([message])
            if index == self._leading and message.get("role") in _SYSTEM:
                self._leading += 1
            elif message.get("role") == "user":
                if self._user is not None:
                    self._latest |= dict.fromkeys((("user", word) for word in self._asked), index)
                    yield self._user
                self._user, self._asked = message, self._literals_in(message)
            else:
                if (role := _role(message)) in _SYSTEM:
                    self._latest |= dict.fromkeys(((role, word) for word in self._literals_in(message)), index)
                yield message

    def _order(self) -> tuple[frozenset[tuple[str, _Found]], ...]:
        """Return the literals of dropped system and user messages, ordered by their last occurrence."""
        latest = sorted(self._latest.items(), key=itemgetter(1))
        return tuple(frozenset(word for word, _ in group) for _, group in groupby(latest, key=itemgetter(1)))

    def _add_features(self, seen: set[object], messages: Iterable[Fields]) -> None:
        """Add the features of the messages. A new feature invalidates all proofs, which were made for conversations without it."""
        found = {feature for message in messages for feature in self._features(message)}
        if not found <= seen:
            seen |= found
            self._proved.clear()

    def _features(self, message: Fields) -> Iterator[object]:
        kind = _kind(message, None)
        yield kind
        yield from ((kind[0], word) for word in self._literals_in(message))
        if self._literals.numbers and self._literals.numbers[-1] > _LONGEST_TEXT:
            longest = max(map(len, strings(message)), default=0)
            yield from ((kind[0], number) for number in self._literals.numbers if _LONGEST_TEXT < number <= longest)

    def _literals_in(self, message: Fields) -> frozenset[_Found]:
        """Return the template's string literals that occur in the message."""
        found = _occurrences(self._literals.strings, strings(message), ignored=False)
        if not self._literals.any_case:
            return found
        lower = frozenset(word.lower() for word in self._literals.strings)
        return found | _occurrences(lower, (text.lower() for text in strings(message)), ignored=True)


def _occurrences(words: Iterable[str], texts: Iterable[str], *, ignored: bool) -> frozenset[_Found]:
    both = [(text, text.strip()) for text in texts]
    return frozenset(
        (word, stripped.startswith(word), stripped.endswith(word), ignored)
        for word in words
        for text, stripped in both
        if word in text
    )


def _counted(messages: Iterable[Fields]) -> Counter[str]:
    """Return the number of messages of each role, and of tool calls."""
    counted: Counter[str] = Counter()
    for message in messages:
        calls = message.get("tool_calls")
        counted[_role(message)] += 1
        counted[_CALLS] += len(calls) if isinstance(calls, list) else 0
    return counted


def _role(message: Fields) -> str:
    return str(message.get("role"))


def _with_text(message: Fields, text: str) -> Fields:
    content = message.get("content")
    if isinstance(content, list):
        parts: list[JSON] = [_with_part_text(part, text) for part in content]
        return {**message, "content": parts}
    return {**message, "content": text} if isinstance(content, str) and content.strip() else message


def _with_part_text(part: JSON, text: str) -> JSON:
    known = part.get("text") if isinstance(part, Mapping) else None
    return {**part, "text": text} if isinstance(part, Mapping) and isinstance(known, str) and known.strip() else part


def _kind(message: Fields, completion: Fields | None) -> Kind:
    """Return role, kinds of content and reasoning, tool calls and field names.

    For a tool result, also whether `completion` made the call.
    """
    calls = message.get("tool_calls")
    linked = completion is not None and message.get("tool_call_id") in _call_ids(completion)
    thoughts = tuple(_content_kind(message.get(name)) for name in REASONING)
    arguments = tuple(_arguments_kind(call) for call in (calls if isinstance(calls, list) else [])[:_MANY])
    return (
        _role(message),
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


def _call_ids(completion: Fields) -> Sequence[JSON]:
    calls = completion.get("tool_calls")
    return [call.get("id") for call in (calls if isinstance(calls, list) else []) if isinstance(call, Mapping)]
