"""Conversion between protos and the REST API's JSON, driven by the proto descriptors and a few tables.

protobuf's own `json_format` writes 64-bit integers and nested JSON as strings, and is many times slower for token ids. Here
enums are names, times are RFC 3339 in UTC, durations are seconds, and JSON texts are spliced in verbatim.
"""

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from types import MappingProxyType
from typing import Any, Final

import msgspec
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from osmosis.rollout.v1 import event_pb2, outcome_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_client.enums import OTHER, enum_names, enum_values

from rollout_gateway.json_body import parts_of, texts_of
from rollout_gateway.message_json import message_json, spliced, tool_json

# Objects of request bodies. They contain the fields that are set and those in `_ALWAYS`, so that they can be sent again.
_SPARSE: Final = frozenset({"RolloutSpec", "Target", "Sampling", "Limits", "Tokenizer", "Staleness"})
_ALWAYS: Final = frozenset(
    {"RolloutSpec.rollout_id", "RolloutSpec.messages", "Target.url", "Tokenizer.name", "Staleness.max_lag"}
)
# Fields of other objects that are left out if unset or empty.
_OPTIONAL: Final = frozenset(
    {"Answered.extra_json", "Answered.message", "Answered.spans", "Appended.messages", "Asked.sampling"}
    | {"StartRolloutResponse.access"}
    | {"Forked.messages", "Observed.value_json", "Span.planes", "ToolReturned.message", "ModelCalled.message"}
    | {"Forked.after_turn", "SegmentOrigin.parting", "Outcome.capture"}
)
# Fields that are null if unset. Times and optional numbers are too.
_NULLABLE: Final = frozenset(
    {"Rollout.delivery", "Rollout.outcome", "Group.result", "Sample.logprobs", "Span.logprobs"}
    | {"Span.mask_reason", "SampleSpan.mask_reason"}
)
_RENAMED: Final = {
    "Limits.time": "seconds",
    "RolloutSpec.cancel_after_detach": "cancel_after_detach_seconds",
    "GetServerInfoResponse.max_rollout_time": "max_rollout_seconds",
}
# Fields that are left out: copies of other fields for the asynchronous HTTP API, and ends, which `outcome_json` writes.
_HIDDEN: Final = frozenset(
    {"RolloutSpec.source_json", "StartRolloutResponse.function_tools_json"}
    | {"Outcome.stop", "Outcome.failure", "Outcome.cancellation"}
)
# The smallest view (`RolloutView`) that contains the field.
_VIEWS: Final[Mapping[str, int]] = {
    "RolloutSpec.messages": pb.ROLLOUT_VIEW_MESSAGES,
    "Outcome.messages": pb.ROLLOUT_VIEW_MESSAGES,
    "Outcome.samples": pb.ROLLOUT_VIEW_SAMPLES,
    "Outcome.segments": pb.ROLLOUT_VIEW_FULL,
}
# The view of the outcome in a `finished` event, by the event's detail.
_EVENT_VIEWS: Final[Mapping[int, int]] = {
    event_pb2.EVENT_DETAIL_MESSAGES: pb.ROLLOUT_VIEW_MESSAGES,
    event_pb2.EVENT_DETAIL_OUTCOME: pb.ROLLOUT_VIEW_MESSAGES,
    event_pb2.EVENT_DETAIL_FULL: pb.ROLLOUT_VIEW_FULL,
}
_INTERNAL: Final = "internal"
_NO_TEXT: Final = msgspec.Raw()


@dataclass(frozen=True, slots=True)
class FieldForm:
    """How one field of a message is written to JSON and read from it."""

    name: str
    key: str
    #: The field's descriptor. protobuf has two implementations of it without a common type.
    field: Any
    #: Left out if unset.
    optional: bool
    #: null if unset.
    nullable: bool
    #: The smallest view that contains the field; 0: every view does.
    view: int
    #: Converts a value to JSON, given the view.
    show: Callable[[Any, int], Any]

    def is_unset(self, message: Any) -> bool:
        """Return whether the field is unset in a message, or empty if its type cannot be unset."""
        return not (message.HasField(self.name) if self.field.has_presence else getattr(message, self.name))

    def parse(self, value: Any, text: msgspec.Raw) -> Any:
        """Convert a value of a body for the message's constructor; `text` is the value's raw JSON text."""
        if self.field.enum_type:
            numbers = enum_values(self.field.enum_type)
            return [numbers[each] for each in value] if self.field.is_repeated else numbers[value]
        if self.name.endswith("_json"):
            return bytes(text).decode()
        kind = self.field.message_type and self.field.message_type.name
        if kind in _SPARSE:
            return message_fields(vars(value), self.field.message_type, parts_of(text))
        if kind == "ModelsEntry":
            target = self.field.message_type.fields_by_name["value"].message_type
            return {name: message_fields(vars(each), target) for name, each in value.items()}
        return _PARSERS[kind](value, text) if kind in _PARSERS else value


def message_fields(
    values: Mapping[str, Any], message: Any, texts: Mapping[str, msgspec.Raw] = MappingProxyType({})
) -> dict[str, Any]:
    """Return constructor arguments of a message for the values of a body's object. Unknown keys are ignored.

    `message` is the message's descriptor, `texts` are the raw JSON texts of the object's parts.
    """
    return {
        form.name: form.parse(values[form.key], texts.get(form.key, _NO_TEXT))
        for form in forms(message)
        if values.get(form.key) is not None
    }


@cache
def forms(message: Any) -> tuple[FieldForm, ...]:
    """Return the forms of a message's fields, given its descriptor."""
    return tuple(
        _form(message.name, field) for field in message.fields if f"{message.name}.{field.name}" not in _HIDDEN
    )


def _form(owner: str, field: Any) -> FieldForm:
    path = f"{owner}.{field.name}"
    optional = path in _OPTIONAL or (owner in _SPARSE and path not in _ALWAYS)
    is_time = field.message_type is not None and field.message_type.full_name == "google.protobuf.Timestamp"
    is_number = field.has_presence and not field.message_type
    return FieldForm(
        name=field.name,
        key=_RENAMED.get(path, field.name.removesuffix("_json")),
        field=field,
        optional=optional,
        nullable=not optional and (path in _NULLABLE or is_time or is_number),
        view=_VIEWS.get(path, 0),
        show=_converter(field, optional),
    )


def _converter(field: Any, optional: bool) -> Callable[[Any, int], Any]:
    if field.message_type and field.message_type.GetOptions().map_entry:
        entry = _value_converter(field.message_type.fields_by_name["value"], optional) or _same
        return lambda value, view: {name: entry(each, view) for name, each in sorted(value.items())}
    one = _value_converter(field, optional)
    if not field.is_repeated:
        return one or _same
    if one is None:
        return lambda value, _: list(value)
    return lambda value, view: [one(each, view) for each in value]


def _same(value: Any, _: int) -> Any:
    return value


def _value_converter(field: Any, optional: bool) -> Callable[[Any, int], Any] | None:
    """Return the converter of a single value; None if the value is written unchanged."""
    if field.message_type:
        written: Callable[[Any, int], Any] = _MESSAGES.get(field.message_type.name, message_to_json)
        return written
    if field.enum_type:
        names, other = enum_names(field.enum_type), None if optional else OTHER
        return lambda value, _: names.get(value, other)
    if field.name.endswith("_json"):
        return lambda value, _: spliced(value)
    if field.name == "response_mask":
        return lambda value, _: list(value)
    return (lambda value, _: base64.b64encode(value).decode()) if field.type == field.TYPE_BYTES else None


def message_to_json(message: Any, view: int = pb.ROLLOUT_VIEW_FULL) -> dict[str, Any]:
    """Return a message as a JSON object, with the fields that the view (`RolloutView`) contains."""
    found: dict[str, Any] = {}
    for form in forms(message.DESCRIPTOR):
        if form.view > view:
            continue
        if (form.optional or form.nullable) and form.is_unset(message):
            if form.nullable:
                found[form.key] = None
            continue
        value = form.show(getattr(message, form.name), view)
        if value is not None or not form.optional:
            found[form.key] = value
    return found


def response_json(message: Any, view: int = pb.ROLLOUT_VIEW_BASIC) -> bytes:
    """Return the JSON text of a message, for the body of a response."""
    return msgspec.json.encode(message_to_json(message, view))


def outcome_json(outcome: outcome_pb2.Outcome, view: int) -> dict[str, Any]:
    """Return an outcome as one object: `end` names the kind of end, then follow that end's fields and the outcome's."""
    kind = outcome.WhichOneof("end") or "failure"
    end = message_to_json(getattr(outcome, kind))
    if end.get("category") == OTHER:  # the contract requires this of readers that do not know a category
        end["category"] = _INTERNAL
    return {"end": kind} | end | message_to_json(outcome, view)


def event_json(event: event_pb2.RolloutEvent, detail: int) -> dict[str, Any] | None:
    """Return an event as an object: the common fields, then those of its kind. None for an unknown kind, to be skipped."""
    kind = event.WhichOneof("event")
    if kind is None:
        return None
    found = {
        "sequence": event.sequence,
        "time": _time(event.time) if event.HasField("time") else None,
        "event": kind,
        "turn": event.turn,
        "segment_id": event.segment_id,
    }
    return found | message_to_json(getattr(event, kind), _EVENT_VIEWS.get(detail, pb.ROLLOUT_VIEW_BASIC))


def group_item_json(item: pb.WatchGroupResponse, view: int) -> dict[str, Any] | None:
    """Return an item of a group as an object, like `event_json`."""
    kind = item.WhichOneof("item")
    return kind and {"sequence": item.sequence, "event": kind} | message_to_json(getattr(item, kind), view)


def _time(time: Timestamp, _: int = 0) -> str:
    # To the microsecond. protobuf's own conversion takes ten times as long, which would be a third of an event's cost.
    whole = datetime.fromtimestamp(time.seconds, UTC).isoformat()
    return f"{whole[:19]}.{time.nanos // 1000:06d}Z"


def duration(seconds: float) -> Duration:
    """Return seconds as a Duration, rounded to the nearest nanosecond."""
    whole, rest = divmod(round(seconds * 1e9), 1_000_000_000)
    return Duration(seconds=whole, nanos=rest)


_CLASSES: Final = outcome_pb2.FailureClass.DESCRIPTOR
_PARSERS: Final[Mapping[str, Callable[[Any, msgspec.Raw], Any]]] = {
    "Duration": lambda value, _: duration(value),
    "Message": lambda _, text: [{"json": each} for each in texts_of(text)],
    "TrainOn": lambda value, _: {"classes": [enum_values(_CLASSES)[each] for each in value]},
}
_MESSAGES: Final[Mapping[str, Callable[[Any, int], Any]]] = {
    "Timestamp": _time,
    "Duration": lambda value, _: (value.seconds * 10**9 + value.nanos) / 10**9,
    "Message": lambda value, _: message_json(value),
    "Tool": lambda value, _: tool_json(value),
    "Logprobs": lambda value, _: list(value.values),
    "TrainOn": lambda value, _: [enum_names(_CLASSES).get(each, OTHER) for each in value.classes],
    "Outcome": outcome_json,
}
