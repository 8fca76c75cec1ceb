"""Messages of the contract as the plain API's JSON, and its bodies as messages: by their descriptors, and a few tables.

protobuf's own `json_format` writes 64-bit integers as texts, JSON texts within texts, and token ids one by one, which takes
many times as long. Here enums are names, times are RFC 3339 in UTC, durations are seconds, and JSON texts are spliced in.
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

from rollout_gateway.json_body import parts_of, texts_of
from rollout_gateway.message_json import message_json, spliced, tool_json
from rollout_gateway.rest import enums

# Objects of bodies, which tell what is set and nothing else, but for these: so they could be sent to start another rollout.
_SPARSE: Final = frozenset({"RolloutSpec", "Target", "Sampling", "Limits", "Tokenizer"})
_ALWAYS: Final = frozenset({"RolloutSpec.rollout_id", "RolloutSpec.messages", "Target.url", "Tokenizer.name"})
# Left out of other objects where they are unset or empty.
_OPTIONAL: Final = frozenset(
    {"Answered.extra_json", "Answered.message", "Answered.spans", "Appended.messages", "Asked.sampling"}
    | {"Forked.messages", "Observed.value_json", "Span.planes", "ToolReturned.message"}
)
# null where they are unset, as are times and the contract's optional numbers.
_NULLABLE: Final = frozenset(
    {"Rollout.delivery", "Rollout.outcome", "Sample.logprobs", "Span.logprobs"}
    | {"Span.mask_reason", "SampleSpan.mask_reason"}
)
_RENAMED: Final = {"Limits.time": "seconds", "RolloutSpec.cancel_after_detach": "cancel_after_detach_seconds"}
# What the other fields hold, as another protocol writes it; `outcome_json` tells the ends.
_HIDDEN: Final = frozenset(
    {"RolloutSpec.source_json", "StartRolloutResponse.function_tools_json"}
    | {"Outcome.stop", "Outcome.failure", "Outcome.cancellation"}
)
# The least view (`RolloutView`) that holds them.
_VIEWS: Final[Mapping[str, int]] = {
    "RolloutSpec.messages": pb.ROLLOUT_VIEW_MESSAGES,
    "Outcome.messages": pb.ROLLOUT_VIEW_MESSAGES,
    "Outcome.samples": pb.ROLLOUT_VIEW_SAMPLES,
    "Outcome.segments": pb.ROLLOUT_VIEW_FULL,
}
# The view in which the outcome of a `finished` event comes, by the event's detail.
_EVENT_VIEWS: Final[Mapping[int, int]] = {
    event_pb2.EVENT_DETAIL_MESSAGES: pb.ROLLOUT_VIEW_MESSAGES,
    event_pb2.EVENT_DETAIL_OUTCOME: pb.ROLLOUT_VIEW_MESSAGES,
    event_pb2.EVENT_DETAIL_FULL: pb.ROLLOUT_VIEW_FULL,
}
_INTERNAL: Final = "internal"
_NO_TEXT: Final = msgspec.Raw()


@dataclass(frozen=True, slots=True)
class FieldForm:
    """A field of a message and what becomes of it in an object."""

    name: str
    key: str
    #: Its descriptor, of which there are two implementations.
    field: Any
    #: Left out where it is unset.
    optional: bool
    #: null where it is unset.
    nullable: bool
    #: The least view that holds it; 0: all do.
    view: int
    #: Its value in JSON, given the value and the view.
    show: Callable[[Any, int], Any]

    def is_unset(self, message: Any) -> bool:
        """Whether the message does not have it."""
        return not (message.HasField(self.name) if self.field.has_presence else getattr(message, self.name))

    def parse(self, value: Any, text: msgspec.Raw) -> Any:
        """A value of a body as the message's constructor takes it; `text` is the value as it stands in the body."""
        if self.field.enum_type:
            enum = self.field.enum_type
            return (
                [enums.value_of(enum, each) for each in value]
                if self.field.is_repeated
                else enums.value_of(enum, value)
            )
        if self.name.endswith("_json"):
            return bytes(text).decode()
        match self.field.message_type and self.field.message_type.name:
            case "Duration":
                return duration(value)
            case "Message":
                return [{"json": each} for each in texts_of(text)]
            case "Target" | "Sampling" | "Limits" | "Tokenizer":
                return message_fields(vars(value), self.field.message_type, parts_of(text))
        return value


def message_fields(
    values: Mapping[str, Any], message: Any, texts: Mapping[str, msgspec.Raw] = MappingProxyType({})
) -> dict[str, Any]:
    """What the constructor of a message takes, of an object's values and the texts of its parts. Other keys are ignored.

    `message` is its descriptor.
    """
    return {
        form.name: form.parse(values[form.key], texts.get(form.key, _NO_TEXT))
        for form in forms(message)
        if values.get(form.key) is not None
    }


@cache
def forms(message: Any) -> tuple[FieldForm, ...]:
    """The forms of a message's fields, by its descriptor."""
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
        return lambda value, _: dict(sorted(value.items()))
    one = _value_converter(field, optional)
    if not field.is_repeated:
        return one or _same
    if one is None:
        return lambda value, _: list(value)
    return lambda value, view: [one(each, view) for each in value]


def _same(value: Any, _: int) -> Any:
    return value


def _value_converter(field: Any, optional: bool) -> Callable[[Any, int], Any] | None:
    """How one value is shown; None: as it is."""
    if field.message_type:
        written: Callable[[Any, int], Any] = _MESSAGES.get(field.message_type.name, message_to_json)
        return written
    if field.enum_type:
        names, other = enums.names(field.enum_type), None if optional else enums.OTHER
        return lambda value, _: names.get(value, other)
    if field.name.endswith("_json"):
        return lambda value, _: spliced(value)
    if field.name == "response_mask":
        return lambda value, _: list(value)
    return (lambda value, _: base64.b64encode(value).decode()) if field.type == field.TYPE_BYTES else None


def message_to_json(message: Any, view: int = pb.ROLLOUT_VIEW_FULL) -> dict[str, Any]:
    """A message as an object, with as much of it as the view (`RolloutView`) holds."""
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
    """The JSON text of a message, the body of an answer."""
    return msgspec.json.encode(message_to_json(message, view))


def outcome_json(outcome: outcome_pb2.Outcome, view: int) -> dict[str, Any]:
    """An outcome: how it ended stands first, in one object with the rest."""
    kind = outcome.WhichOneof("end") or "failure"
    end = message_to_json(getattr(outcome, kind))
    if end.get("category") == enums.OTHER:  # as the contract asks of readers of a category that they do not know
        end["category"] = _INTERNAL
    return {"end": kind} | end | message_to_json(outcome, view)


def event_json(event: event_pb2.RolloutEvent, detail: int) -> dict[str, Any] | None:
    """An event: what all have, then its own fields. None for a kind that is not known here, which readers are to skip."""
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


def _time(time: Timestamp, _: int = 0) -> str:
    # To the microsecond. A tenth of what protobuf's own conversion takes, which would be a third of what an event costs.
    whole = datetime.fromtimestamp(time.seconds, UTC).isoformat()
    return f"{whole[:19]}.{time.nanos // 1000:06d}Z"


def duration(seconds: float) -> Duration:
    """Seconds as a duration, rounded to the nearest nanosecond."""
    whole, rest = divmod(round(seconds * 1e9), 1_000_000_000)
    return Duration(seconds=whole, nanos=rest)


_MESSAGES: Final[Mapping[str, Callable[[Any, int], Any]]] = {
    "Timestamp": _time,
    "Duration": lambda value, _: (value.seconds * 10**9 + value.nanos) / 10**9,
    "Message": lambda value, _: message_json(value),
    "Tool": lambda value, _: tool_json(value),
    "Logprobs": lambda value, _: list(value.values),
    "Outcome": outcome_json,
}
