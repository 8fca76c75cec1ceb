"""Conversations from a file: one JSON value on each line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rollout_server.core.message import JSON, MalformedMessage, Message, parse_json
from rollout_server.tokencheck.conversation import TOOLS, CheckConversation

KIND = "yours"


def read(path: Path) -> list[CheckConversation]:
    """Each line is an object with `messages` and perhaps `tools`, or a list of messages, which are given the built-in tools.

    Raises ValueError that names the line, and what cannot be read of it; OSError where there is no such file.
    """
    found = list(_lines(path))
    if not found:
        raise ValueError(f"{path} holds no conversation")
    return found


def _lines(path: Path) -> Iterator[CheckConversation]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8") from None
    # Only a line feed ends a line: JSON strings may hold the other characters at which `splitlines` cuts.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield _conversation(parse_json(line), f"{KIND}, line {number}")
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None


def _conversation(value: JSON, kind: str) -> CheckConversation:
    given = value if isinstance(value, dict) else {"messages": value, "tools": list(TOOLS)}
    messages, tools = given.get("messages"), given.get("tools")
    if not isinstance(messages, list) or not messages:
        raise MalformedMessage('a list of messages is needed, or an object with one under "messages"')
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise MalformedMessage("tools is not a list of objects")
    fields = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise MalformedMessage(f"messages[{index}] is not an object")
        try:
            Message.parsed("", message)
        except MalformedMessage as error:
            raise MalformedMessage(f"messages[{index}]: {error}") from None
        fields.append(message)
    conversation = CheckConversation(
        kind, tuple(fields), tools if tools is None else tuple(t for t in tools if isinstance(t, dict))
    )
    if not any(index + 1 < len(fields) for index in conversation.answers):
        raise MalformedMessage("no message follows an answer of the role assistant, so there is nothing to look at")
    return conversation
