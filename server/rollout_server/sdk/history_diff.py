"""Detects whether a message list of an agent loop continues a conversation.

A loop passes the whole conversation each time. A rollout's history only grows, and the completions in it are the exact generated
tokens. A list therefore continues a conversation if it consists of the previous list, the last completion and any new messages.

The author's own classes may have rebuilt the completion. It counts as unchanged if role, content and tool calls are equal and no
other key was changed or added. A dropped key counts as unchanged, because the rollout keeps the completion as received. Earlier
messages are compared with the form in which the author passed them before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollout_server.core.message import MalformedMessage, parse_json
from rollout_server.sdk.core.schemas import MessageDict

_COMPARED_KEYS = ("role", "content", "tool_calls")


class SerializedMessages(list[MessageDict]):
    """A message list of a loop. `texts` holds each message in normalised form, computed once for comparisons."""

    def __init__(self, messages: Sequence[MessageDict]) -> None:
        super().__init__(messages)
        self.texts = [_text(message) for message in messages]


class ConversationHistory:
    """Messages of one conversation, as its loop has passed them so far."""

    def __init__(self, messages: Sequence[MessageDict]) -> None:
        self._seen = _texts(messages)
        self._completion: Mapping[str, Any] | None = None
        self.has_completion = False

    @property
    def known(self) -> int:
        """Number of messages, including the last completion."""
        return len(self._seen) + (self._completion is not None)

    def follows(self, messages: Sequence[MessageDict]) -> bool:
        """Return whether the list is this conversation, with or without new messages at the end."""
        seen = len(self._seen)
        if len(messages) < self.known or _texts(messages)[:seen] != self._seen:
            return False
        return self._completion is None or _is_same(self._completion, messages[seen])

    def extend(self, messages: Sequence[MessageDict], stop: int) -> None:
        """Take over the messages before index `stop` of a list that continues this conversation."""
        if stop > self.known:
            self._seen, self._completion = _texts(messages)[:stop], None

    def append_completion(self, messages: Sequence[MessageDict], completion: Mapping[str, Any]) -> None:
        """Set the completion of this list."""
        self._seen, self._completion, self.has_completion = _texts(messages), completion, True


def _texts(messages: Sequence[MessageDict]) -> list[str]:
    return messages.texts if isinstance(messages, SerializedMessages) else [_text(message) for message in messages]


def _is_same(completion: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    expected, passed = _plain(completion), _plain(message)
    if any(expected.get(key) != passed.get(key) for key in _COMPARED_KEYS):
        return False
    return all(
        _json_text(expected.get(key)) == _json_text(value) for key, value in passed.items() if key not in _COMPARED_KEYS
    )


def _text(message: Mapping[str, Any]) -> str:
    return _json_text(_plain(message))


def _json_text(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message without nulls, empty content, an empty list of calls and white space in arguments."""
    plain = {key: value for key, value in message.items() if value is not None}
    if plain.get("content") in ("", []):
        del plain["content"]
    calls = plain.pop("tool_calls", None)
    if calls:
        plain["tool_calls"] = _json_text([_plain_call(call) for call in calls] if isinstance(calls, list) else calls)
    return plain


def _plain_call(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    function = call.get("function")
    plain = {key: value for key, value in call.items() if value is not None and key != "index"}
    plain.setdefault("type", "function")
    if isinstance(function, dict):
        plain["function"] = {"arguments": "", **{key: value for key, value in function.items() if value is not None}}
        plain["function"]["arguments"] = _plain_arguments(plain["function"]["arguments"])
    return plain


def _plain_arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return parse_json(arguments)
    except MalformedMessage:
        return arguments
