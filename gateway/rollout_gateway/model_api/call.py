"""What the APIs have in common: a parsed request and a completion."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from osmosis.rollout.v1.agent_service_pb2 import CallModelRequest, HistoryMessage, ModelCompletion, ModelPrompt
from osmosis.rollout.v1.message_pb2 import Tool

from rollout_gateway.http.request_body import MAX_DEPTH, demand_bounded
from rollout_gateway.json_body import InvalidBody
from rollout_gateway.model_api.fields import MAX_WORD, InvalidCall, Object, parse_json, text_of_json

#: A frame of server-sent events: the event's name (empty: none) and its data.
Frame = tuple[str, Any]
#: Name in the responses to a request that names no model.
DEFAULT_MODEL: Final = "rollout"
# The only key of arguments that hold a text which is not a JSON object, in APIs whose arguments are objects.
_RAW: Final = "__raw_arguments"
# Arguments come back within a message within a body, whose depth is limited.
_MAX_DEPTH: Final = MAX_DEPTH - 16


class UnreadableReply(Exception):
    """A completion with a message that is not JSON, is nested too deeply, or has a field of another type."""


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
    """Take a completion apart. Raises UnreadableReply."""
    try:
        return _taken_apart(completion, parse_json(completion.message_json))
    except (ValueError, RecursionError, TypeError, AttributeError) as error:
        text = "a field has the wrong type" if isinstance(error, TypeError | AttributeError) else str(error)
        raise UnreadableReply(text) from None


def _taken_apart(completion: ModelCompletion, message: Any) -> Reply:
    """Trainers may send content as parts, arguments as objects, and calls without an id or function."""
    calls = []
    for index, each in enumerate(message.get("tool_calls") or ()):
        function = each.get("function") if isinstance(each, dict) else None
        if not isinstance(function, dict):
            continue
        call_id, arguments = each.get("id") or f"call_{completion.id}_{index}", function.get("arguments") or "{}"
        calls.append(FunctionCall(str(call_id), str(function.get("name") or ""), text_of_json(arguments)))
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(str(part.get("text") or "") for part in content)
    numbers = completion.finish_reason, completion.prompt_tokens, completion.generated_tokens
    return Reply(completion.id, content, str(message.get("reasoning_content") or ""), calls, *numbers)


def call_json(call_id: str, name: str, arguments: str) -> Object:
    """Return a tool call as chat completions have it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def arguments_object(text: str) -> Object:
    """Return arguments as an object. A text that is none, or a deep one, is kept under a key; `arguments_text` restores it."""
    try:
        demand_bounded(text.encode(), max_depth=_MAX_DEPTH)
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, InvalidBody):
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

    def prompt(
        self, tools: Sequence[Tool], hosted: Sequence[str], instructions: Sequence[str] = (), previous: str = ""
    ) -> ModelPrompt:
        """Return what the model is to see; `previous` is the id of the completion that the messages follow."""
        shown: dict[str, Any] = {
            "instructions": instructions,
            "messages": self.messages,
            "tools": tools,
            "hosted_tools": hosted,
        }
        return ModelPrompt(**shown, previous_completion_id=previous)

    def demand_open(self, key: str) -> None:
        """Refuse a conversation without messages, and one that ends with a message of the model. `key` is its field."""
        if not self.messages:
            raise InvalidCall(key, "must not be empty")
        if msgspec.json.decode(self.messages[-1].json).get("role") == "assistant":
            text = "the last message is the assistant's; continuing it (prefill) is not supported"
            raise InvalidCall(self.places[-1], text)
