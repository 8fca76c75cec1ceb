"""JSON request bodies. The caller's free-form JSON (messages, metadata) is passed on character for character.

A body is read twice: it is parsed and validated as usual, and it is split into the raw texts of its parts. The raw texts are
passed on. Parsing and encoding them again would lose key order, white space, repeated keys and large integers.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, Generic, TypeVar, get_args

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

MAX_MESSAGES: Final = 10_000
MAX_VIOLATIONS: Final = 20
# More keys than any strict object has. Validation would report every further key as a fault of its own.
_MAX_KEYS: Final = 100
# CPython refuses to convert longer decimals. Every bound is far below, so a huge value of the same sign replaces them.
_MAX_DIGITS: Final = 4300
_HUGE: Final = 10**30
_Model = TypeVar("_Model", bound=BaseModel)
_Texts = dict[str, msgspec.Raw]


class InvalidBody(ValueError):
    """A body that fails validation. `violations` are its first faults as FastAPI's `{"type", "loc", "msg"}`.

    They do not repeat the values that were sent: a value may be large, and it may be the callback key.
    """

    def __init__(self, violations: Sequence[dict[str, Any]]) -> None:
        super().__init__("the body does not validate")
        self.violations = first_of(violations)


@dataclass(frozen=True, slots=True)
class ParsedBody(Generic[_Model]):
    """A valid body: its values, and the raw JSON texts of its parts."""

    body: _Model
    parts: Mapping[str, msgspec.Raw] = field(repr=False)

    def text(self, key: str, *inner: str) -> str:
        """Return the raw JSON text of a part, or of a part of a part; empty if it is null or absent."""
        raw = self.parts.get(key)
        for name in inner:
            raw = parts_of(raw).get(name)
        found = b"" if raw is None else bytes(raw)
        return "" if found == b"null" else found.decode()

    @property
    def messages(self) -> tuple[str, ...]:
        """Raw JSON texts of the messages, one object each."""
        return texts_of(self.parts["messages"])


def parts_of(raw: msgspec.Raw | None) -> _Texts:
    """Return the raw texts of an object's values by key; empty if `raw` is not an object."""
    try:
        return {} if raw is None else msgspec.json.decode(raw, type=_Texts)
    except msgspec.ValidationError:
        return {}


def texts_of(raw: msgspec.Raw) -> tuple[str, ...]:
    """Return the raw texts of a list's items."""
    return tuple(bytes(each).decode() for each in msgspec.json.decode(raw, type=list[msgspec.Raw]))


def demand_json(request: Request) -> None:
    """Raise InvalidBody for other content types: browsers send some of them to other origins without a CORS preflight."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise InvalidBody([violation("content_type", (), "The Content-Type must be application/json")])


def read_body(content: bytes, model: type[_Model], max_metadata_bytes: int | None = None) -> ParsedBody[_Model]:
    """Parse and validate a body. Raises InvalidBody, which names the first faults but repeats no value.

    JSON is as in RFC 8259 (no NaN, no lone surrogates), in UTF-8, with integers of any size. `metadata` may have
    `max_metadata_bytes` bytes of JSON text. A body has at most `MAX_MESSAGES` messages, because each may be a fault.
    """
    values, parts = _decoded(content)
    if isinstance(values, dict):
        messages = values.get("messages")
        _bound(messages if isinstance(messages, list) else (), MAX_MESSAGES, ("messages",), "messages")
        if model.model_config.get("extra") == "forbid":
            for key in ("", *(model.model_fields.keys() - {"metadata"})):
                value = values.get(key) if key else values
                _bound(value if isinstance(value, dict) else (), _MAX_KEYS, (key,) if key else (), "keys")
    try:
        body = model.model_validate(values)
    except ValidationError as error:
        raise InvalidBody([_violation(each, model) for each in error.errors(include_url=False)]) from None
    if max_metadata_bytes is not None:
        _bound(bytes(parts.get("metadata", b"")), max_metadata_bytes, ("metadata",), "bytes as JSON")
    return ParsedBody(body, parts)


def _bound(found: Any, most: int, loc: tuple[str, ...], what: str) -> None:
    if len(found) > most:
        raise InvalidBody([violation("too_long", loc, f"At most {most} {what}")])


def violation(kind: str, loc: tuple[str | int, ...], message: str) -> dict[str, Any]:
    """Return one entry of a 422's `detail`; `loc` is the place within the body."""
    return {"type": kind, "loc": ("body", *loc), "msg": message}


def first_of(violations: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first `MAX_VIOLATIONS` violations, and an entry that counts the others."""
    first, more = list(violations[:MAX_VIOLATIONS]), len(violations) - MAX_VIOLATIONS
    return [*first, violation("too_many", (), f"{more} more are not listed")] if more > 0 else first


def _violation(error: Any, model: type[BaseModel]) -> dict[str, Any]:
    unknown = error["type"] == "extra_forbidden"
    found = violation(error["type"], error["loc"], _unknown_key(error, model) if unknown else error["msg"])
    # For this package's validators, ctx is the exception itself, which adds nothing to the message.
    if "ctx" in error and error["type"] != "value_error":
        found["ctx"] = error["ctx"]
    return found


def _unknown_key(error: Any, model: type[BaseModel]) -> str:
    """Return the message for an unknown key. It says where the key, or the keys inside it, belong."""
    value = error["input"]
    parts = (value, *value.values()) if isinstance(value, dict) else ()
    if error["loc"][-1] in (owners := _owners(model)):
        return f"is not known here; it belongs {owners[error['loc'][-1]]}"
    if any(isinstance(part, dict) and not part.keys().isdisjoint(model.model_fields) for part in parts):
        return "is not known here; the keys of a request belong at the top of the body"
    return "is not known here"


@cache
def _owners(model: type[BaseModel]) -> Mapping[str, str]:
    """Map every known key of a body, nested ones included, to a phrase for its place."""
    owners: dict[str, list[str]] = {}
    for name, info in model.model_fields.items():
        for kind in get_args(info.annotation) or (info.annotation,):
            for inner in getattr(kind, "model_fields", ()):
                owners.setdefault(inner, []).append(name)
    nested = {name: f"in {' or '.join(owner)}" for name, owner in owners.items()}
    return nested | dict.fromkeys(model.model_fields, "at the top of the body")


def _decoded(content: bytes) -> tuple[Any, _Texts]:
    """Parse a JSON text. Returns its values, and the raw texts of its parts."""
    try:
        values = json.loads(content.decode(), parse_int=_integer)
        # msgspec is stricter: in the whole body, it refuses malformed JSON that json.loads accepts.
        return values, parts_of(msgspec.Raw(content))
    except json.JSONDecodeError as error:
        raise _not_json((error.pos,), error.msg) from None
    except UnicodeDecodeError as error:
        raise _not_json((error.start,), "not UTF-8") from None
    except msgspec.DecodeError as error:
        raise _not_json((), str(error)) from None
    except RecursionError:
        raise _not_json((), "nested too deeply") from None


def _not_json(loc: tuple[int, ...], reason: str) -> InvalidBody:
    return InvalidBody([violation("json_invalid", loc, f"JSON decode error: {reason}")])


def _integer(digits: str) -> int:
    if len(digits) <= _MAX_DIGITS:
        return int(digits)
    return -_HUGE if digits.startswith("-") else _HUGE
