"""Whether a conversation only grew."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from rollout_server.testing.checks.renderer import Message

Reading: TypeAlias = Callable[[Message], str]
"""Gives a message as a text that is equal for messages that say the same."""


def canonical(message: Message) -> str:
    """Keys whose value is null say the same as absent keys, and the order of keys says nothing, except inside of
    `arguments`, which templates render in the order given. ``8`` and ``8.0`` differ.
    """
    return verbatim({key: value for key, value in message.items() if value is not None})


def verbatim(message: Message) -> str:
    """The same for a dialect whose messages go through untouched: a null is there or is not."""
    return json.dumps(_ordered(message))


def first_difference(known: Sequence[str], messages: Sequence[Message], read: Reading = canonical) -> int | None:
    """The first index at which `messages` does not begin with the messages `known` by their texts."""
    for index, text in enumerate(known):
        if index >= len(messages) or read(messages[index]) != text:
            return index
    return None


def _ordered(value: object) -> object:
    if isinstance(value, Mapping):
        return [[key, value[key] if key == "arguments" else _ordered(value[key])] for key in sorted(value)]
    if isinstance(value, list | tuple):
        return ["", *(_ordered(item) for item in value)]
    return value
