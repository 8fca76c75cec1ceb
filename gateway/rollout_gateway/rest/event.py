"""Events as JSON, and as the frames of a stream of server-sent events (WHATWG HTML, 9.2)."""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec
from osmosis.rollout.v1 import event_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb

from rollout_gateway.message_json import message_json
from rollout_gateway.rest import enums
from rollout_gateway.rest.outcome import origin_json, outcome_json, span_json
from rollout_gateway.rest.rollout import time_json
from rollout_gateway.rest.spec import sampling_json, spliced

# The view in which the outcome of a `finished` event comes.
_VIEWS: Final[Mapping[int, int]] = MappingProxyType(
    {
        event_pb2.EVENT_DETAIL_MESSAGES: pb.ROLLOUT_VIEW_MESSAGES,
        event_pb2.EVENT_DETAIL_OUTCOME: pb.ROLLOUT_VIEW_MESSAGES,
        event_pb2.EVENT_DETAIL_FULL: pb.ROLLOUT_VIEW_FULL,
    }
)
_BEYOND_ASCII: Final = re.compile(r"[^\x00-\x7f]")
_BREAKS: Final = str.maketrans("\r\n", "  ")


def event_json(event: event_pb2.RolloutEvent, detail: int) -> dict[str, Any] | None:
    """An event: what all have, then its own fields. None for a kind that is not known here, which readers are to skip."""
    kind = event.WhichOneof("event")
    if kind is None:
        return None
    found = {
        "sequence": event.sequence,
        "time": time_json(event, "time"),
        "event": kind,
        "turn": event.turn,
        "segment_id": event.segment_id,
    }
    if kind == "finished":
        view = _VIEWS.get(detail, pb.ROLLOUT_VIEW_BASIC)
        return found | {"outcome": outcome_json(event.finished.outcome, view)}
    return found | _OWN[kind](getattr(event, kind))


def frame(event: event_pb2.RolloutEvent, detail: int) -> bytes:
    """The frame of an event: `id` is its sequence, `event` its kind, `data` its JSON on one line of ASCII.

    An event that is not recorded has no id. One of an unknown kind has nothing but its id, which readers take note of without
    being told of an event.
    """
    identity = f"id: {event.sequence}\n" if event.sequence else ""
    found = event_json(event, detail)
    if found is None:
        return f"{identity}\n".encode() if identity else b""
    return f"{identity}event: {found['event']}\ndata: {one_line(msgspec.json.encode(found).decode())}\n\n".encode()


def one_line(text: str) -> str:
    """A JSON text without line breaks and in ASCII: readers differ in what they take for a break and for a character.

    Line breaks stand between a text's tokens only, all else that is not ASCII within its strings.
    """
    text = text.translate(_BREAKS) if "\n" in text or "\r" in text else text
    return text if text.isascii() else _BEYOND_ASCII.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x10000:
        return f"\\u{code:04x}"
    code -= 0x10000
    return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"


def _fields(*names: str) -> Callable[[Any], dict[str, Any]]:
    return lambda own: {name: getattr(own, name) for name in names}


def _segment_opened(own: event_pb2.SegmentOpened) -> dict[str, Any]:
    return {"origin": origin_json(own.origin), "prompt_tokens": own.prompt_tokens}


def _asked(own: event_pb2.Asked) -> dict[str, Any]:
    found = _fields("turn_key", "messages")(own)
    if own.HasField("sampling"):
        found["sampling"] = sampling_json(own.sampling)
    return found


def _answered(own: event_pb2.Answered) -> dict[str, Any]:
    found: dict[str, Any] = {
        "finish_reason": own.finish_reason,
        "prompt_tokens": own.prompt_tokens,
        "generated_tokens": own.generated_tokens,
        "tool_calls": own.tool_calls,
        "attempts": own.attempts,
        "elapsed_ms": own.elapsed_ms,
        "verified": own.verified,
        "policy_version": own.policy_version,
        "mask_length": own.mask_length if own.HasField("mask_length") else None,
    }
    if own.HasField("message"):
        found["message"] = message_json(own.message)
    if own.extra_json:
        found["extra"] = msgspec.Raw(own.extra_json.encode())
    if own.spans:
        found["spans"] = [span_json(span) for span in own.spans]
    return found


def _appended(own: event_pb2.Appended) -> dict[str, Any]:
    found: dict[str, Any] = {"count": own.count}
    if own.messages:
        found["messages"] = [message_json(message) for message in own.messages]
    return found


def _forked(own: event_pb2.Forked) -> dict[str, Any]:
    found: dict[str, Any] = {
        "of_segment_id": own.of_segment_id,
        "origin": origin_json(own.origin),
        "count": own.count,
        "tools": list(own.tools),
    }
    if own.messages:
        found["messages"] = [message_json(message) for message in own.messages]
    return found


def _observed(own: event_pb2.Observed) -> dict[str, Any]:
    value = {"value": spliced(own.value_json)} if own.value_json else {}
    return {"what": own.what} | value


def _tool_returned(own: event_pb2.ToolReturned) -> dict[str, Any]:
    found = _fields("call_id", "name", "index", "failed", "elapsed_ms")(own)
    if own.HasField("message"):
        found["message"] = message_json(own.message)
    return found


def _drift_found(own: event_pb2.DriftFound) -> dict[str, Any]:
    kind = enums.DRIFT_KINDS.get(own.kind, enums.OTHER)
    return {"kind": kind} | _fields("index", "expected_tokens", "reported_tokens", "expected_text", "reported_text")(
        own
    )


_OWN: Final[Mapping[str, Callable[[Any], dict[str, Any]]]] = MappingProxyType(
    {
        "accepted": _fields("messages", "agent", "agent_version"),
        "segment_opened": _segment_opened,
        "asked": _asked,
        "answered": _answered,
        "appended": _appended,
        "tool_started": _fields("call_id", "name", "index"),
        "tool_returned": _tool_returned,
        "drift_found": _drift_found,
        "resumed": _fields("times"),
        "note": _fields("code", "text"),
        "forked": _forked,
        "given_up": _fields(),
        "masked": _fields("reason"),
        "observed": _observed,
    }
)
