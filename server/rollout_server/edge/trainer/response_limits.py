"""How much an answer may hold, checked on its bytes: parsing it makes a Python object of every value, and holds the GIL meanwhile.

Who answers is not under this server's control, so every answer, over HTTP and gRPC, passes here before it is parsed.
"""

from __future__ import annotations

from typing import Final

import msgspec

from rollout_server.core.limits import CALLS_READ
from rollout_server.core.message import MalformedMessage, has_more_values

ANSWER_BYTES: Final = 32 * 1024 * 1024
"""Bytes of one answer: four times what a million prompt ids and as many characters of text take as JSON."""
ANSWER_VALUES: Final = 2**21
"""Values of one answer, token ids and logprobs included."""
MESSAGE_BYTES: Final = 2 * 1024 * 1024
"""Bytes of an answer's message. It is rendered, and tokenizing takes some hundred bytes of memory for each of its bytes."""
MESSAGE_VALUES: Final = 2**16
"""Values of an answer's message, which is parsed on the event loop again, by whoever reads it."""


class _AnyObject(msgspec.Struct, gc=False):
    """Any object. One without fields is the cheapest there is."""


class _ToolCallList(msgspec.Struct):
    tool_calls: list[_AnyObject] | None = None


_calls_decoder: Final = msgspec.json.Decoder(_ToolCallList)


def check_values(data: bytes, most: int) -> None:
    """Raises `MalformedMessage` for JSON of more than `most` values, without parsing it."""
    if has_more_values(data, most):
        raise MalformedMessage(f"it holds more than {most} values, which is the most that is read")


def check_message(data: bytes, most_calls: int) -> None:
    """Raises `MalformedMessage` for a message that is too large, or holds more than `most_calls` tool calls."""
    # The calls first: their number says more of what is wrong.
    if data.count(b"{") > most_calls:
        try:
            calls = _calls_decoder.decode(data).tool_calls or ()
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            calls = ()  # the parser says what is wrong
        check_calls(len(calls), most_calls)
    check_size(len(data))
    check_values(data, MESSAGE_VALUES)


def check_size(size: int) -> None:
    """Raises `MalformedMessage` for a message of more bytes than are read of an answer."""
    if size > MESSAGE_BYTES:
        raise MalformedMessage(f"it has {size} bytes, at most {MESSAGE_BYTES} are read")


def check_calls(calls: int, most: int) -> None:
    """Raises `MalformedMessage` for more tool calls than are read of an answer."""
    if calls > most:
        where = f"{CALLS_READ} times `limits.calls_per_turn`, which the request or the agent sets"
        raise MalformedMessage(f"tool_calls holds {calls} calls, at most {most} are read: {where}")
