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

_SAID = ("role", "content", "tool_calls")


class Following:
    """The conversation of one rollout, as its loop has shown it so far."""

    def __init__(self, messages: Sequence[Mapping[str, Any]]) -> None:
        self._seen = [_text(message) for message in messages]
        self._answer: Mapping[str, Any] | None = None
        self._given: Sequence[MessageDict] | None = None
        self._shown: list[str] = []

    def new_messages(self, given: Sequence[MessageDict]) -> Sequence[MessageDict] | None:
        """What came after the last answer; None where the list is not the conversation so far with something appended."""
        self._given, self._shown = given, [_text(message) for message in given]
        known = len(self._seen)
        if self._shown[:known] != self._seen:
            return None
        if self._answer is None:
            return given[known:]
        if len(given) == known or not _is_same(self._answer, given[known]):
            return None
        return given[known + 1 :]

    def answered(self, given: Sequence[MessageDict], answer: Mapping[str, Any]) -> None:
        """The model has answered this list."""
        self._seen = self._shown if given is self._given else [_text(message) for message in given]
        self._answer = answer


def _is_same(answer: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    said, written = _plain(answer), _plain(given)
    if any(said.get(key) != written.get(key) for key in _SAID):
        return False
    return all(_dumped(said.get(key)) == _dumped(value) for key, value in written.items() if key not in _SAID)


def _text(message: Mapping[str, Any]) -> str:
    return _dumped(_plain(message))


def _dumped(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message without what says nothing: nulls, an empty content or list of calls, white space in arguments."""
    plain = {key: value for key, value in message.items() if value is not None}
    if plain.get("content") in ("", []):
        del plain["content"]
    calls = plain.pop("tool_calls", None)
    if calls:
        plain["tool_calls"] = _dumped([_plain_call(call) for call in calls] if isinstance(calls, list) else calls)
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
