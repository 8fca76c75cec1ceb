"""Follows the message list of an agent loop, which hands over the whole conversation each time.

A rollout's history only grows, and the answers in it are the model's own words, token for token. So a list is followed where it
is the list of the turn before, the last answer, and whatever came after it. The answer may have been written anew by the author's
own classes: it is the same one if role, content and tool calls say the same, and nothing was changed or added beside them; a key
that such classes dropped is taken as unchanged, for the rollout keeps the answer as it came. A message that was there before is
compared with how the author wrote it before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollout_server.core.message import MalformedMessage, parse_json
from rollout_server.sdk.core.schemas import MessageDict

_COMPARED_KEYS = ("role", "content", "tool_calls")


class MessageList(list[MessageDict]):
    """A list of messages as a loop hands it over; `texts` are what it is compared by, made once."""

    def __init__(self, messages: Sequence[MessageDict]) -> None:
        super().__init__(messages)
        self.texts = [_text(message) for message in messages]


class ConversationHistory:
    """One conversation, as its loop has shown it so far."""

    def __init__(self, messages: Sequence[MessageDict]) -> None:
        self._seen = _texts(messages)
        self._completion: Mapping[str, Any] | None = None
        self.has_completion = False

    @property
    def known(self) -> int:
        """How many messages it holds."""
        return len(self._seen) + (self._completion is not None)

    def follows(self, messages: Sequence[MessageDict]) -> bool:
        """Whether the list is the conversation so far, with or without something appended."""
        seen = len(self._seen)
        if len(messages) < self.known or _texts(messages)[:seen] != self._seen:
            return False
        return self._completion is None or _is_same(self._completion, messages[seen])

    def extend(self, messages: Sequence[MessageDict], stop: int) -> None:
        """The conversation holds the first messages of a list that follows it, those before `stop`."""
        if stop > self.known:
            self._seen, self._completion = _texts(messages)[:stop], None

    def append_completion(self, messages: Sequence[MessageDict], completion: Mapping[str, Any]) -> None:
        """The model has answered this list."""
        self._seen, self._completion, self.has_completion = _texts(messages), completion, True


def _texts(messages: Sequence[MessageDict]) -> list[str]:
    return messages.texts if isinstance(messages, MessageList) else [_text(message) for message in messages]


def _is_same(completion: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    ours, theirs = _plain(completion), _plain(message)
    if any(ours.get(key) != theirs.get(key) for key in _COMPARED_KEYS):
        return False
    return all(
        _json_text(ours.get(key)) == _json_text(value) for key, value in theirs.items() if key not in _COMPARED_KEYS
    )


def _text(message: Mapping[str, Any]) -> str:
    return _json_text(_plain(message))


def _json_text(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message without what says nothing: nulls, an empty content or list of calls, white space in arguments."""
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
