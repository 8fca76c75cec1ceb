"""Readers of the fields of a request. Errors name the field."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from osmosis.rollout.v1.message_pb2 import Tool
from osmosis.rollout.v1.spec_pb2 import Sampling

from rollout_gateway.json_body import MAX_MESSAGES

Object = Mapping[str, Any]
#: Most characters of a name or an id that a client sends.
MAX_WORD: Final = 256
_MAX_UINT32: Final = 2**32 - 1
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
#: Types of tools that clients run and that have no schema: Anthropic's, which end with a date, and those of the responses API.
_BUILT_IN: Final = re.compile(
    r"(bash|text_editor|computer|memory)_[0-9]{8}|computer(_use_preview)?|local_shell|apply_patch"
)
_KINDS: Final = {str: "a string", bool: "true or false", dict: "an object", list: "a list", int: "an integer"}


class InvalidCall(Exception):
    """A request that the endpoint refuses. `place` is the field's path in the body, such as "messages[3].content"."""

    def __init__(self, place: str, text: str) -> None:
        super().__init__(f"{place}: {text}")
        self.place = place


def text_of_json(value: Any) -> str:
    """Return a value as JSON text; a string stays as it is."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def parse_json(text: str | bytes, *, finite: bool = False) -> Any:
    """Parse JSON. Lone surrogates, where a client has cut a text, become U+FFFD. `finite`: refuse NaN and too large numbers.

    Raises ValueError, RecursionError.
    """
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        found = json.dumps(json.loads(text), ensure_ascii=False, allow_nan=not finite)
        return json.loads(_SURROGATE.sub("\N{REPLACEMENT CHARACTER}", found))


def decode(content: bytes) -> Object:
    """Parse a body. Raises InvalidCall."""
    try:
        found = parse_json(content, finite=True)
    except (ValueError, RecursionError) as error:
        raise InvalidCall("body", f"not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidCall("body", "must be a JSON object")
    return found


def read(values: Any, key: str, kind: type, place: str = "") -> Any:
    """Return a value of an object; None if it is absent or null. Raises InvalidCall if it is not of the `kind`."""
    where = f"{place}.{key}" if place else key
    if not isinstance(values, dict):
        raise InvalidCall(place, "must be an object")
    value = values.get(key)
    if value is None:
        return None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InvalidCall(where, f"must be {_KINDS[kind]}")
    return value


def need(values: Any, key: str, kind: type, place: str = "") -> Any:
    """Return a required value, as `read` does."""
    value = read(values, key, kind, place)
    if value is None:
        raise InvalidCall(f"{place}.{key}" if place else key, "is missing")
    return value


def items(values: Any, key: str, place: str = "") -> Sequence[tuple[str, Any]]:
    """Return the objects of a list with their places; none if it is absent. A list has a maximum length."""
    found = read(values, key, list, place) or []
    where = f"{place}.{key}" if place else key
    if len(found) > MAX_MESSAGES:
        raise InvalidCall(where, f"at most {MAX_MESSAGES} items")
    for index, each in enumerate(found):
        if not isinstance(each, dict):
            raise InvalidCall(f"{where}[{index}]", "must be an object")
    return [(f"{where}[{index}]", each) for index, each in enumerate(found)]


def refuse(values: Object, **texts: str) -> None:
    """Raise InvalidCall for the first of these keys that is present and neither null, false, 0 nor empty."""
    for key, text in texts.items():
        if values.get(key):
            raise InvalidCall(key, text)


def image(place: str, url: Any) -> Object:
    """Return the part for an image with a data: URL."""
    if not isinstance(url, str) or not url.startswith("data:"):
        raise InvalidCall(place, "images must be inline, with a data: URL; files and other URLs are not read")
    return {"type": "image_url", "image_url": {"url": url}}


def hosted_tool(place: str, kind: str) -> str:
    """Return the type of a tool that the API's provider runs. Raises InvalidCall for one that the client runs itself.

    The provider's models have learned how to call such a tool, and the call has no schema that another model could be shown.
    """
    if _BUILT_IN.fullmatch(kind):
        raise InvalidCall(
            f"{place}.type", f"only the provider's models know how to call {kind}; offer a function instead"
        )
    return kind


def tool(place: str, values: Object, schema_key: str = "parameters", name: str = "") -> Tool:
    """Return a function tool."""
    return Tool(
        name=name or need(values, "name", str, place),
        description=read(values, "description", str, place) or "",
        parameters_json_schema=text_of_json(read(values, schema_key, dict, place) or ""),
        strict=bool(read(values, "strict", bool, place)),
    )


def sampling(values: Object, most: str, stops: str, extra: Object) -> Sampling:
    """Return the sampling parameters. Raises InvalidCall.

    `most` is the key of the maximum number of tokens, `stops` that of the texts that end a completion.
    """
    max_tokens = read(values, most, int)
    if max_tokens is not None and not 0 < max_tokens <= _MAX_UINT32:
        raise InvalidCall(most, f"must be from 1 to {_MAX_UINT32}")
    stop = values.get(stops) or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(each, str) for each in stop):
        raise InvalidCall(stops, "must be a string or a list of strings")
    return Sampling(
        temperature=_number(values, "temperature"),
        top_p=_number(values, "top_p"),
        max_tokens=max_tokens,
        stop=stop,
        extra_json=text_of_json(given) if (given := {k: v for k, v in extra.items() if v is not None}) else "",
    )


def _number(values: Object, key: str) -> float | None:
    value = values.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise InvalidCall(key, "must be a number")
    if value is not None and not -1e308 < value < 1e308:
        raise InvalidCall(key, "is too large")
    return value


def model_name(values: Object) -> str:
    """Return the name of the model in a request. Any name is accepted. Raises InvalidCall for one that is too long."""
    found: str = read(values, "model", str) or ""
    if len(found) > MAX_WORD:
        raise InvalidCall("model", f"at most {MAX_WORD} characters")
    return found
