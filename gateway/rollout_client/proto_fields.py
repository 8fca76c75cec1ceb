"""Conversion of Python values to protobuf fields, checked before anything is sent.

One rule applies to all messages: a keyword is the name of a field without the suffix `_json`. A wrong value raises TypeError or
ValueError with its path, such as `sampling.stop[0]`. Error texts omit the values, because some are secrets.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from decimal import Decimal
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, Final, TypeVar, cast

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message as AnyMessage
from google.protobuf.message_factory import GetMessageClass
from osmosis.rollout.v1.message_pb2 import ChatMessage, Message
from osmosis.rollout.v1.spec_pb2 import Target, Tokenizer, TrainOn

from rollout_client.enums import enum_values

_JSON: Final = "_json"
_LONGEST_DURATION: Final = 315_576_000_000
_INTEGERS: Final[Mapping[int, tuple[int, int]]] = MappingProxyType(
    {
        FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
        FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
        FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
        FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    }
)
#: Messages that may be given as a str, and the field that the str sets.
_NAMED: Final = MappingProxyType({Target.DESCRIPTOR.full_name: "url", Tokenizer.DESCRIPTOR.full_name: "name"})
_M = TypeVar("_M", bound=AnyMessage)


def build(kind: type[_M], fields: Mapping[str, object], where: str = "") -> _M:
    """Create a message with these fields; None leaves a field unset. `where` is the path before the names in error texts."""
    message = kind()
    fill(message, fields, where)
    return message


def fill(message: AnyMessage, fields: Mapping[str, object], where: str = "") -> None:
    """Set fields of a message, as `build` does. Raises TypeError and ValueError that name the field."""
    for key, value in fields.items():
        field, one_of_many = _field(message, key, where)
        if value is not None:
            _set(message, field, [value] if one_of_many else value, where + key)


def keywords(message: type[AnyMessage]) -> frozenset[str]:
    """Return the keywords for a message's fields."""
    return frozenset(name.removesuffix(_JSON) for name in message.DESCRIPTOR.fields_by_name)


def _field(message: AnyMessage, key: object, where: str) -> tuple[FieldDescriptor, bool]:
    """Return the field of a keyword, and whether the keyword is the singular of a repeated field's name."""
    if not isinstance(key, str):
        raise TypeError(f"{where or 'keywords '}: field names must be str, not {_kind(key)}")
    known = message.DESCRIPTOR.fields_by_name
    for name, one_of_many in ((key, False), (key + _JSON, False), (key + "s", True), (key + "es", True)):
        if name in known and (not one_of_many or known[name].is_repeated):
            return cast(FieldDescriptor, known[name]), one_of_many
    close = difflib.get_close_matches(key, keywords(type(message)), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else f"; use one of {', '.join(sorted(keywords(type(message))))}"
    raise TypeError(f"unknown argument {where + key!r}{hint}")


def _set(message: AnyMessage, field: FieldDescriptor, value: object, where: str) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _set_map(getattr(message, field.name), field.message_type.fields_by_name["value"], value, where)
    elif field.is_repeated:
        items = [_item(field, each, f"{where}[{index}]") for index, each in enumerate(_list(field, value, where))]
        getattr(message, field.name).extend(items)
    elif field.message_type is not None:
        getattr(message, field.name).CopyFrom(_item(field, value, where))
    else:
        setattr(message, field.name, _item(field, value, where))


def _item(field: FieldDescriptor, value: object, where: str) -> object:
    if field.message_type is not None:
        return _message(GetMessageClass(field.message_type), value, where)
    if field.enum_type is not None:
        return enum_number(field.enum_type, value, where)
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return json_text(value, where) if field.name.endswith(_JSON) else text(value, where)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        if not isinstance(value, bool):
            raise TypeError(f"{where} must be True or False, not {_kind(value)}")
        return value
    if field.cpp_type in _INTEGERS:
        return _integer(value, *_INTEGERS[field.cpp_type], where)
    return number(value, where)


def _message(kind: type[AnyMessage], value: object, where: str) -> AnyMessage:
    if isinstance(value, kind):
        return value
    if kind is Duration:
        return duration(value, where)
    if kind is Message:
        return _chat(value, where)
    if kind is TrainOn:
        return _train_on(value, where)
    name = kind.DESCRIPTOR.full_name
    if isinstance(value, str) and name in _NAMED:
        return build(kind, {_NAMED[name]: value}, where + ".")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return build(kind, value, where + ".")
    forms = " a str," if name in _NAMED else ""
    raise TypeError(f"{where} must be{forms} a mapping of its fields or a {kind.__name__}, not {_kind(value)}")


def _train_on(value: object, where: str) -> TrainOn:
    """Convert a collection of failure classes, such as ["policy", "deadline"]. An empty one is set, too: nothing trains."""
    field = TrainOn.DESCRIPTOR.fields_by_name["classes"]
    listed = enumerate(_list(field, value, where))
    return TrainOn(classes=[cast(int, _item(field, each, f"{where}[{index}]")) for index, each in listed])  # type: ignore[misc]


def _chat(value: object, where: str) -> Message:
    """Convert a message of the conversation. A str is its JSON form and is sent unchanged."""
    if isinstance(value, ChatMessage):
        return Message(chat=value)
    return Message(json=json_text(value, where))


def text(value: object, where: str) -> str:
    """Check a str that UTF-8 can encode. Raises TypeError and ValueError that name `where`."""
    if not isinstance(value, str):
        raise TypeError(f"{where} must be a str, not {_kind(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where} contains half of a surrogate pair, which UTF-8 cannot encode") from None
    return value


def json_text(value: object, where: str) -> str:
    """Return the text of a JSON object: a mapping is serialized, also with values of NumPy; a str is returned unchanged.

    Raises TypeError for other types, ValueError for NaN, infinities, cycles and excessive nesting.
    """
    if isinstance(value, str):
        return text(value, where)
    if not isinstance(value, Mapping):
        raise TypeError(f"{where} must be a mapping or a str with a JSON object, not {_kind(value)}")
    try:
        written = json.dumps(dict(value), ensure_ascii=False, allow_nan=False, default=_plain)
    except TypeError as error:
        raise TypeError(f"{where}: {error}") from None
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply") from None
    except ValueError as error:
        # The messages of json.dumps name NaN, infinities and circular references, never the content.
        raise ValueError(f"{where}: {error}") from None
    return text(written, where)


def _plain(value: Any) -> Any:
    """Return Python's value for a number or an array of NumPy, which rows of datasets contain. Raises TypeError for others."""
    if not callable(getattr(value, "tolist", None)):
        raise TypeError(f"a value of type {type(value).__name__} cannot be written as JSON")
    return value.tolist()


def number(value: object, where: str) -> float:
    """Check a finite number. Raises TypeError and ValueError that name `where`."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{where} must be a number, not {_kind(value)}")
    try:
        given = float(value)
    except OverflowError:
        given = math.inf
    if not math.isfinite(given):
        raise ValueError(f"{where} must be a finite number")
    return given


def duration(value: object, where: str) -> Duration:
    """Convert seconds or a timedelta to a Duration, exact to the nanosecond: 2.3 is 2 s and 300,000,000 ns."""
    if isinstance(value, timedelta):
        nanos = value // timedelta(microseconds=1) * 1000
    else:
        # Decimal(repr(...)) uses the number as written. As a float, 2.3 * 1e9 is 2299999999.9999995.
        nanos = round(Decimal(repr(number(value, where))).scaleb(9))
    if abs(nanos) > _LONGEST_DURATION * 1_000_000_000:
        raise ValueError(f"{where} must be at most {_LONGEST_DURATION} s")
    made = Duration()
    made.FromNanoseconds(nanos)
    return made


def duration_seconds(duration: Duration) -> float:
    """Return a Duration in seconds."""
    return duration.ToNanoseconds() / 1_000_000_000


def _integer(value: object, least: int, most: int, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{where} must be an integer, not {_kind(value)}")
    given = int(value)
    if not least <= given <= most:
        raise ValueError(f"{where} must be from {least} to {most}")
    return given


def enum_number(kind: EnumDescriptor, value: object, where: str) -> int:
    """Return the number of an enum value by its lower-case name. Raises TypeError and ValueError that name `where`."""
    known: Mapping[str, int] = enum_values(kind)
    if not isinstance(value, str):
        raise TypeError(f"{where} must be one of {', '.join(known)}, not {_kind(value)}")
    if value not in known:
        raise ValueError(f"{where} must be one of {', '.join(known)}")
    return known[value]


def _set_map(entries: Any, field: FieldDescriptor, value: object, where: str) -> None:
    """Set a map field with str keys. `field` is the descriptor of its values."""
    if not isinstance(value, Mapping):
        kind = "str" if field.message_type is None else field.message_type.name
        raise TypeError(f"{where} must be a mapping of str to {kind}, not {_kind(value)}")
    for key, each in value.items():
        name, item = text(key, f"a key of {where}"), _item(field, each, f"{where}[{key!r}]")
        if field.message_type is None:
            entries[name] = item
        else:
            entries[name].CopyFrom(item)


def _list(field: FieldDescriptor, value: object, where: str) -> Iterable[object]:
    """Return the items of a list. A str is never split into letters: it is the only item, or an error for messages."""
    if isinstance(value, str) and field.message_type is None:
        return [value]
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping | AnyMessage):
        raise TypeError(f"{where} must be a list, not {_kind(value)}")
    return value if isinstance(value, Sequence) else list(value)


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__
