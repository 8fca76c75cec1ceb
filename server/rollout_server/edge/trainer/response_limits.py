"""Size limits of responses, checked on the raw bytes before parsing.

Parsing creates a Python object per JSON value and holds the GIL meanwhile. Trainers and engines are not under this server's
control, so every response, over HTTP and gRPC, is checked here first.
"""

from __future__ import annotations

import re
from typing import Final, TypeVar

import msgspec

from rollout_server.core.limits import CALLS_READ
from rollout_server.core.message import MalformedMessage, has_more_values
from rollout_server.core.outcome import FailureClass

ANSWER_BYTES: Final = 32 * 1024 * 1024
"""Bytes of one response: four times the JSON size of a million prompt ids and a million characters of text."""
ANSWER_VALUES: Final = 2**21
"""JSON values of one response, including token ids and logprobs."""
MESSAGE_BYTES: Final = 2 * 1024 * 1024
"""Bytes of a completion's message. Tokenizing the rendered message takes some hundred bytes of memory per byte."""
MESSAGE_VALUES: Final = 2**16
"""JSON values of a completion's message. Later readers parse it again on the event loop."""


class TooManyCalls(MalformedMessage):
    """The model made more tool calls than are read: the model's fault, and not that of the endpoint that returned them."""


class _AnyObject(msgspec.Struct, gc=False):
    """Any JSON object. A struct without fields is the cheapest target to decode to."""


class _ToolCallList(msgspec.Struct):
    tool_calls: list[_AnyObject] | None = None


_PLACE: Final = re.compile(r"\(byte (\d+)\)$")
_NOT_FINITE: Final = re.compile(rb"NaN|Infinity")
_calls_decoder: Final = msgspec.json.Decoder(_ToolCallList)
_T = TypeVar("_T")


def decode_response(decoder: msgspec.json.Decoder[_T], body: bytes) -> _T:
    """Decode a response. Raise `MalformedMessage` if it has too many values, is not JSON, or has another shape."""
    check_values(body, ANSWER_VALUES)
    if not body:
        raise MalformedMessage("it is empty")
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise MalformedMessage(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(f"it is not JSON: {error}{_not_finite(body, str(error))}") from None


def _not_finite(body: bytes, error: str) -> str:
    """Return an explanation if a decoder's error is at NaN or Infinity, which Python's json writes unless told otherwise."""
    place = _PLACE.search(error)
    found = _NOT_FINITE.match(body, int(place[1])) if place else None
    return f", which is {found[0].decode()}: JSON has finite numbers only; send null" if found else ""


def check_values(data: bytes, most: int) -> None:
    """Raise `MalformedMessage` for JSON with more than `most` values, without parsing it."""
    if has_more_values(data, most):
        raise MalformedMessage(f"it contains more than {most} values; at most {most} are read")


def check_message(data: bytes, most_calls: int) -> None:
    """Raise `MalformedMessage` for a message that is too large, or has more than `most_calls` tool calls."""
    # The calls first, because their number makes the clearer error.
    if data.count(b"{") > most_calls:
        try:
            calls = _calls_decoder.decode(data).tool_calls or ()
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            calls = ()  # the parser will report the error
        check_calls(len(calls), most_calls)
    check_size(len(data))
    check_values(data, MESSAGE_VALUES)


def check_size(size: int) -> None:
    """Raise `MalformedMessage` for a message that has too many bytes."""
    if size > MESSAGE_BYTES:
        raise MalformedMessage(f"it has {size} bytes, at most {MESSAGE_BYTES} are read")


def check_calls(calls: int, most: int) -> None:
    """Raise `TooManyCalls` for too many tool calls."""
    if calls > most:
        where = f"{CALLS_READ} times `limits.calls_per_turn`, which the request or the agent sets"
        raise TooManyCalls(f"tool_calls contains {calls} calls; at most {most} are read: {where}")


def class_of_response_error(error: BaseException | None, source: FailureClass) -> FailureClass:
    """Return the class of a response that cannot be used: POLICY if the model is at fault, otherwise the endpoint's `source`."""
    return FailureClass.POLICY if isinstance(error, TooManyCalls) else source
