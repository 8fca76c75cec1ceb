"""What the APIs have in common: a parsed request, a completion, and readers of body fields that name the field in errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from osmosis.rollout.v1.agent_service_pb2 import CallModelRequest, HistoryMessage, ModelCompletion
from osmosis.rollout.v1.message_pb2 import Tool
from osmosis.rollout.v1.spec_pb2 import Sampling

from rollout_gateway.json_body import MAX_MESSAGES

Object = Mapping[str, Any]
#: A frame of server-sent events: the event's name (empty: none) and its data.
Frame = tuple[str, Any]
#: Name in the responses to a request that names no model.
DEFAULT_MODEL: Final = "rollout"
#: Most characters of a name or an id that a client sends.
MAX_WORD: Final = 256
_MAX_UINT32: Final = 2**32 - 1
_NO_PARAMETERS: Final = {"type": "object", "properties": {}}
# The only key of arguments that hold a text which is not a JSON object, in APIs whose arguments are objects.
_RAW: Final = "__raw_arguments"
_KINDS: Final = {str: "a string", bool: "true or false", dict: "an object", list: "a list", int: "an integer"}


class InvalidCall(Exception):
    """A request that the endpoint refuses. `place` is the field's path in the body, such as "messages[3].content"."""

    def __init__(self, place: str, text: str) -> None:
        super().__init__(f"{place}: {text}")
        self.place = place


@dataclass(frozen=True, slots=True)
class ApiCall:
    """A parsed request.

    Args:
        request: the call, without the rollout's uid and what the headers say.
        stream: the response is a stream of server-sent events.
        places: path in the body of each message of the prompt.
        echo: fields of the request that the response repeats or depends on.
        namespaced: namespace and name of the tools whose name in the prompt joins both, by that name.
    """

    request: CallModelRequest
    stream: bool
    places: Sequence[str]
    echo: Object = field(default_factory=dict)
    namespaced: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """The name of the model in the response: that of the request."""
        return self.request.model or DEFAULT_MODEL


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A tool call of a completion. `arguments` is the text that the model wrote."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Reply:
    """A completion, taken apart."""

    id: str
    content: str
    reasoning: str
    calls: Sequence[FunctionCall]
    finish_reason: str
    prompt_tokens: int
    generated_tokens: int


def reply_of(completion: ModelCompletion) -> Reply:
    """Take a completion apart. A trainer may send content as parts, calls without ids and arguments as objects."""
    message = msgspec.json.decode(completion.message_json)
    calls = [
        FunctionCall(
            str(each.get("id") or f"call_{completion.id}_{index}"),
            str(each["function"].get("name") or ""),
            text_of_json(each["function"].get("arguments") or "{}"),
        )
        for index, each in enumerate(message.get("tool_calls") or ())
        if isinstance(each, dict) and isinstance(each.get("function"), dict)
    ]
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(str(part.get("text") or "") for part in content)
    return Reply(
        completion.id,
        content,
        str(message.get("reasoning_content") or ""),
        calls,
        completion.finish_reason,
        completion.prompt_tokens,
        completion.generated_tokens,
    )


def text_of_json(value: Any) -> str:
    """Return a value as JSON text; a string stays as it is."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def arguments_object(text: str) -> Object:
    """Return arguments as an object. A text that is no JSON object is kept under one key, and `arguments_text` restores it."""
    try:
        found = msgspec.json.decode(text)
    except msgspec.DecodeError:
        found = None
    return found if isinstance(found, dict) else {_RAW: text}


def arguments_text(value: Object) -> str:
    """Return the text of arguments that a client sends back as an object."""
    raw = value.get(_RAW) if len(value) == 1 else None
    return raw if isinstance(raw, str) else text_of_json(value)


class History:
    """The messages of a prompt and their places in the body."""

    def __init__(self) -> None:
        self.messages: list[HistoryMessage] = []
        self.places: list[str] = []

    def add(self, place: str, message: Object, completion_id: str = "") -> None:
        """Add a message. `completion_id` is what the client sent as such: it may be anything."""
        known = completion_id if len(completion_id) <= MAX_WORD else ""
        self.messages.append(HistoryMessage(json=text_of_json(message), completion_id=known))
        self.places.append(place)

    def demand_no_prefill(self) -> None:
        """Refuse a conversation that ends with a message of the model."""
        if self.messages and msgspec.json.decode(self.messages[-1].json).get("role") == "assistant":
            text = "the last message is the assistant's; continuing it (prefill) is not supported"
            raise InvalidCall(self.places[-1], text)


def decode(content: bytes) -> Object:
    """Parse a body. Raises InvalidCall."""
    try:
        found = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
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


def tool(place: str, values: Object, schema_key: str = "parameters", name: str = "") -> Tool:
    """Return a function tool."""
    return Tool(
        name=name or need(values, "name", str, place),
        description=read(values, "description", str, place) or "",
        parameters_json_schema=text_of_json(read(values, schema_key, dict, place) or _NO_PARAMETERS),
        strict=bool(read(values, "strict", bool, place)),
    )


def sampling(values: Object, most: str, stops: str, extra: Object) -> Sampling:
    """Return the sampling parameters. Raises InvalidCall.

    `most` is the key of the maximum number of tokens, `stops` that of the texts that end a completion.
    """
    max_tokens = read(values, most, int)
    if max_tokens is not None and not 0 < max_tokens <= _MAX_UINT32:
        raise InvalidCall(most, "must be 1 or more")
    stop = values.get(stops) or []
    stop = [stop] if isinstance(stop, str) else read(values, stops, list) or []
    if not all(isinstance(each, str) for each in stop):
        raise InvalidCall(stops, "must be texts")
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
    return value


def model_name(values: Object) -> str:
    """Return the name of the model in a request. Any name is accepted. Raises InvalidCall for one that is too long."""
    found: str = read(values, "model", str) or ""
    if len(found) > MAX_WORD:
        raise InvalidCall("model", f"at most {MAX_WORD} characters")
    return found
