"""Selection of rollouts by conditions, and search for a text in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from rollout_server.core.message import JSON, MalformedMessage, parse_object
from rollout_server.core.outcome import Failure, FailureClass, Outcome, failure_class_of
from rollout_server.runtime.outcome_delivery import Delivery, DeliveryState
from rollout_server.runtime.rollout import Rollout, RolloutState
from rollout_server.runtime.start_request import Caller

_WORDS: Final = ("role", "type")
"""Keys of messages whose values are words of the format."""
_PIECE: Final = 64 * 1024
"""Characters that are searched in one step: about 0.1 ms, and a millisecond if they have to be parsed."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Selects the rollouts that `caller` may see and that meet every condition that is set.

    `text` is not one of the `conditions`, because a search takes long: see `TextSearch`.
    """

    caller: Caller
    uids: tuple[str, ...] = ()
    rollout_ids: tuple[str, ...] = ()
    group_id: str = ""
    agent: str = ""
    states: tuple[RolloutState, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    delivery_states: tuple[DeliveryState, ...] = ()
    callers: tuple[str, ...] = ()
    failure_classes: tuple[FailureClass, ...] = ()
    text: str = ""

    @property
    def is_unfinished(self) -> bool:
        """Whether no finished rollout is selected."""
        return bool(self.states) and RolloutState.FINISHED not in self.states

    def unfinished(self) -> Selection:
        """Return a selection of at least the unfinished ones among the selected rollouts. They are found quickly."""
        states = [
            each for each in (RolloutState.QUEUED, RolloutState.RUNNING) if each in self.states or not self.states
        ]
        return replace(self, states=tuple(states)) if states else self

    def conditions(self) -> Sequence[Callable[[Rollout], bool]]:
        """Return the conditions that a rollout must meet, except `text`. Only those that are set: a list may test every rollout."""
        caller, callers, uids, labels = self.caller, frozenset(self.callers), frozenset(self.uids), self.labels.items()
        tests: Sequence[tuple[object, Callable[[Rollout], bool]]] = (
            (not caller.admin, lambda each: caller.sees(each.caller)),
            (callers, lambda each: each.caller in callers),
            (uids, lambda each: each.uid in uids),
            (self.rollout_ids, lambda each: each.spec.rollout_id in self.rollout_ids),
            (self.group_id, lambda each: each.spec.group_id == self.group_id),
            (self.agent, lambda each: each.spec.agent == self.agent),
            (labels, lambda each: labels <= each.spec.labels.items()),
            (self.states, lambda each: each.state in self.states),
            (self.delivery_states, lambda each: _delivers_in(each.delivery, self.delivery_states)),
            (self.failure_classes, lambda each: _failed_as(each.outcome, self.failure_classes)),
        )
        return [test for is_set, test in tests if is_set]


def _delivers_in(delivery: Delivery | None, states: tuple[DeliveryState, ...]) -> bool:
    return delivery is not None and delivery.state in states


def _failed_as(outcome: Outcome | None, classes: tuple[FailureClass, ...]) -> bool:
    return outcome is not None and failure_class_of(outcome.end) in classes


class TextSearch:
    """Searches rollouts for a text, ignoring case. `runtime.registry.pages` and saved rollouts have this search in common."""

    def __init__(self, text: str) -> None:
        self._text = text.casefold()
        # As it may be written in JSON.
        escaped = {json.dumps(text, ensure_ascii=ascii_only)[1:-1].casefold() for ascii_only in (True, False)}
        self._escaped = (self._text, *sorted(escaped - {self._text}))

    def steps(self, facts: Iterable[str], messages: Iterable[str]) -> Iterator[bool]:
        """Search a rollout in steps of at most about a millisecond. Yields whether a step found the text.

        Args:
            facts: see `facts_of`.
            messages: the JSON of its messages.
        """
        yield any(self._text in each.casefold() for each in facts)
        for text in messages:
            yield from self._message_steps(text)

    def _message_steps(self, text: str) -> Iterator[bool]:
        if len(text) <= _PIECE:
            # What is not written with \u escapes is parsed only if its JSON contains the text.
            likely = "\\u" in text or "\\/" in text or self._is_in_json(text)
            yield likely and any(self._text in each.casefold() for each in _strings(text))
            return
        overlap = max(map(len, self._escaped))
        for start in range(0, len(text), _PIECE):  # not parsed: the text may also be found in a key
            yield self._is_in_json(text[start : start + _PIECE + overlap])

    def _is_in_json(self, text: str) -> bool:
        folded = text.casefold()
        return any(each in folded for each in self._escaped)


def facts_of(rollout: Rollout) -> Iterator[str]:
    """Yield the texts of a rollout besides its messages."""
    spec = rollout.spec
    yield from (rollout.uid, spec.rollout_id, spec.group_id, spec.agent)
    for pair in spec.labels.items():
        yield from pair
    if rollout.outcome is not None:
        end = rollout.outcome.end
        yield end.message if isinstance(end, Failure) else end.reason


def _strings(text: str) -> Iterator[str]:
    """Yield the strings of a message, except for keys, its role, and the types of its parts and calls."""
    try:
        waiting: list[JSON] = [parse_object(text)]
    except MalformedMessage:  # only in a file: a server accepts no such message
        return
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            waiting.extend(each for key, each in value.items() if key not in _WORDS)
        elif isinstance(value, list):
            waiting.extend(value)
