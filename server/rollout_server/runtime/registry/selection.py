"""Selection of rollouts by conditions, and search for a text in them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from rollout_server.core.message import JSON, MalformedMessage, Message
from rollout_server.core.outcome import Failure, FailureClass, Outcome, failure_class_of
from rollout_server.runtime.outcome_delivery import DeliveryState
from rollout_server.runtime.rollout import Rollout, RolloutState
from rollout_server.runtime.start_request import Caller

_PIECE: Final = 64 * 1024
"""Characters that are searched in one step: about 0.1 ms, and a millisecond if they have to be parsed."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Selects the rollouts that `caller` may see and that meet every condition that is set.

    `text` is not checked by `matches`, because a search takes long: see `TextSearch`.
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

    def matches(self, rollout: Rollout) -> bool:
        """Return whether the rollout meets every condition except `text`."""
        spec, delivery = rollout.spec, rollout.delivery
        return (
            self.caller.sees(rollout.caller)
            and (not self.callers or rollout.caller in self.callers)
            and (not self.uids or rollout.uid in self.uids)
            and (not self.rollout_ids or spec.rollout_id in self.rollout_ids)
            and (not self.group_id or spec.group_id == self.group_id)
            and (not self.agent or spec.agent == self.agent)
            and (not self.states or rollout.state in self.states)
            and (not self.delivery_states or (delivery is not None and delivery.state in self.delivery_states))
            and (not self.failure_classes or _failed_as(rollout.outcome, self.failure_classes))
            and all(spec.labels.get(key) == value for key, value in self.labels.items())
        )


def _failed_as(outcome: Outcome | None, classes: tuple[FailureClass, ...]) -> bool:
    return outcome is not None and failure_class_of(outcome.end) in classes


class TextSearch:
    """Searches rollouts for a text, ignoring case."""

    def __init__(self, text: str) -> None:
        self._text = text.casefold()
        # As it may be written in JSON.
        escaped = {json.dumps(text, ensure_ascii=ascii_only)[1:-1].casefold() for ascii_only in (True, False)}
        self._escaped = (self._text, *sorted(escaped - {self._text}))

    def steps(self, rollout: Rollout) -> Iterator[bool]:
        """Search a rollout in steps of at most about a millisecond. Yields whether a step found the text."""
        yield any(self._text in each.casefold() for each in _facts(rollout))
        for message in rollout.machine.messages:
            yield from self._message_steps(message)

    def _message_steps(self, message: Message) -> Iterator[bool]:
        text = message.text
        if len(text) <= _PIECE:
            # What is not written with \u escapes is parsed only if its JSON contains the text.
            likely = "\\u" in text or "\\/" in text or self._is_in_json(text)
            yield likely and any(self._text in each.casefold() for each in _strings(message))
            return
        overlap = max(map(len, self._escaped))
        for start in range(0, len(text), _PIECE):  # not parsed: the text may also be found in a key
            yield self._is_in_json(text[start : start + _PIECE + overlap])

    def _is_in_json(self, text: str) -> bool:
        folded = text.casefold()
        return any(each in folded for each in self._escaped)


def _facts(rollout: Rollout) -> Iterator[str]:
    """Yield the texts of a rollout besides its messages."""
    spec = rollout.spec
    yield from (rollout.uid, spec.rollout_id, spec.group_id, spec.agent)
    for pair in spec.labels.items():
        yield from pair
    if rollout.outcome is not None:
        end = rollout.outcome.end
        yield end.message if isinstance(end, Failure) else end.reason


def _strings(message: Message) -> Iterator[str]:
    """Yield the strings of a message, except for keys and its role."""
    try:
        waiting: list[JSON] = [value for key, value in message.fields().items() if key != "role"]
    except MalformedMessage:  # the text was accepted as a message, so this does not happen
        return
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
