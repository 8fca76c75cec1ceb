"""Conversion of the REST API's JSON back to protobuf messages, with the tables by which the gateway writes it."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn, TypeAlias, TypeVar

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.timestamp_pb2 import Timestamp
from osmosis.rollout.v1 import event_pb2, message_pb2, outcome_pb2, token_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_client.enums import enum_values
from rollout_gateway.rest.proto_json import duration, forms

Fields: TypeAlias = Mapping[str, Any]
_T = TypeVar("_T")
_ENDS: Final = ("stop", "failure", "cancellation")


def strict_json(text: str | bytes) -> Any:
    """Parse JSON. Unlike `json.loads` it refuses NaN and Infinity, which browsers cannot read. Raises ValueError."""
    return json.loads(text, parse_constant=_refuse)


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def is_rest_json(value: Fields) -> bool:
    """Return whether an object is a rollout of `GET /v1/rollouts/{uid}` and not the JSON form of a protobuf message."""
    outcome = value.get("outcome")
    states = list(enum_values(pb.RolloutState.DESCRIPTOR))
    return value.get("state") in states or (isinstance(outcome, dict) and isinstance(outcome.get("end"), str))


def rollout_of(value: Fields) -> pb.Rollout:
    """Return a rollout of `GET /v1/rollouts/{uid}`. Raises ValueError for JSON of another shape."""

    def read() -> pb.Rollout:
        found: pb.Rollout = _message({**value, "uid": value["uid"]}, pb.Rollout)
        return found

    return _checked(read)


def event_of(value: Fields) -> event_pb2.RolloutEvent:
    """Return an event of `GET /v1/rollouts/{uid}/events`. Raises ValueError for JSON of another shape."""

    def read() -> event_pb2.RolloutEvent:
        found: event_pb2.RolloutEvent = _message(value, event_pb2.RolloutEvent)
        kind = getattr(found, value["event"])
        kind.CopyFrom(_message(value, type(kind)))
        return found

    return _checked(read)


def _checked(read: Callable[[], _T]) -> _T:
    try:
        return read()
    except KeyError as error:
        raise ValueError(f"{error} is missing") from None
    except (TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from None


# Any: generated classes have no common constructor.
def _message(value: Fields, kind: Any) -> Any:
    if not isinstance(value, Mapping):
        raise TypeError(f"{kind.DESCRIPTOR.name} is not an object")
    given = {
        form.name: (form.field, value[form.key]) for form in forms(kind.DESCRIPTOR) if value.get(form.key) is not None
    }
    return kind(**{name: _field(*each) for name, each in given.items()})


def _field(field: Any, value: Any) -> Any:
    if field.message_type and field.message_type.GetOptions().map_entry:
        entry = field.message_type.fields_by_name["value"]
        return {name: _value(entry, each) for name, each in value.items()}
    if field.name == "response_mask":
        return bytes(value)
    return [_value(field, each) for each in value] if field.is_repeated else _value(field, value)


def _value(field: Any, value: Any) -> Any:
    if field.enum_type:
        return enum_values(field.enum_type).get(value, 0)  # 0: a word of a later version
    if field.message_type:
        read = _READERS.get(field.message_type.name)
        return read(value) if read is not None else _message(value, GetMessageClass(field.message_type))
    if field.name.endswith("_json"):
        return json.dumps(value, allow_nan=False)
    return base64.b64decode(value) if field.type == field.TYPE_BYTES else value


def _outcome(value: Fields) -> outcome_pb2.Outcome:
    found: outcome_pb2.Outcome = _message(value, outcome_pb2.Outcome)
    if value["end"] not in _ENDS:
        raise ValueError(f"a rollout cannot end as {value['end']!r}")
    end = getattr(found, value["end"])
    end.CopyFrom(_message(value, type(end)))
    end.SetInParent()
    return found


def _timestamp(value: str) -> Timestamp:
    found = Timestamp()
    found.FromJsonString(value)
    return found


_CLASSES: Final = outcome_pb2.FailureClass.DESCRIPTOR
_READERS: Final[Mapping[str, Callable[[Any], Message | dict[str, Any]]]] = {
    "Timestamp": _timestamp,
    "Duration": duration,
    "Message": lambda value: message_pb2.Message(json=json.dumps(value, allow_nan=False)),
    "Logprobs": lambda value: token_pb2.Logprobs(values=value),
    "TrainOn": lambda value: {"classes": [enum_values(_CLASSES).get(each, 0) for each in value]},
    "Outcome": _outcome,
}
