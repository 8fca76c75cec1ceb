"""Bodies of the synchronous dialect, and how bodies of both dialects are read without losing a character of their messages.

A body is read twice: parsed and validated as usual, and cut into the raw texts of its messages and metadata, which is
what travels on. Parsing and writing again would lose key order, white space, repeated keys and large integers.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema
from starlette.requests import Request

MAX_ROLLOUT_ID: Final = 256
MAX_MESSAGES: Final = 10_000
MAX_VIOLATIONS: Final = 20
# CPython refuses to convert longer decimals; every bound is far below, so a value of the right sign stands for them.
_MAX_DIGITS: Final = 4300
_HUGE: Final = 10**30
_Model = TypeVar("_Model", bound=BaseModel)

EXAMPLE: Final[dict[str, Any]] = {
    "rollout_id": "test-rollout-001",
    "server_url": "http://localhost:9001",
    "messages": [
        {"role": "system", "content": "You are a helpful calculator assistant with access to calculator tools."},
        {"role": "user", "content": "Please calculate 5 plus 3."},
    ],
    "sampling_params": {"temperature": 0.7, "top_p": 0.9, "max_tokens": 512, "logprobs": True},
    "tokenizer_name": "Qwen/Qwen3-8B",
    "max_turns": 10,
    "max_tokens_total": 8192,
}


class InvalidBody(ValueError):
    """A body that does not validate; `violations` are the first of FastAPI's `{"type", "loc", "msg"}`.

    What was sent is not repeated in them: it may be large, and it may hold the callback key.
    """

    def __init__(self, violations: Sequence[dict[str, Any]]) -> None:
        super().__init__("the body does not validate")
        self.violations = first_of(violations)


def not_blank(value: str) -> str:
    """The text itself. Raises ValueError for one of white space only."""
    if not value.strip():
        raise ValueError("must not be blank")
    return value


def http_url(value: str) -> str:
    """The URL without trailing slashes. Raises ValueError for what no trainer can be reached at."""
    try:
        parts = urlsplit(value)
        named = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        # Its text repeats the part of the URL that may hold a password.
        named = False
    if not named:
        raise ValueError("must be an http or https URL with a host")
    return value.rstrip("/")


Hint = Annotated[int, Field(strict=True, ge=1)]
RolloutId = Annotated[str, Field(min_length=1, max_length=MAX_ROLLOUT_ID), AfterValidator(not_blank)]
ServerUrl = Annotated[str, AfterValidator(http_url)]
ShortText = Annotated[str, Field(min_length=1, max_length=256)]
Secret = Annotated[str | None, Field(repr=False, json_schema_extra={"format": "password", "writeOnly": True})]


class Function(BaseModel):
    """What a tool call calls. Unknown keys are kept."""

    model_config = ConfigDict(extra="allow")

    name: ShortText
    arguments: str | dict[str, Any] = Field(description="JSON as the model wrote it, or already an object.")


class ToolCall(BaseModel):
    """One call of a tool by the model. Unknown keys are kept."""

    model_config = ConfigDict(extra="allow")

    id: ShortText
    type: Literal["function"] = "function"
    function: Function


class ChatMessage(BaseModel):
    """A message of the conversation. It goes through untouched, unknown keys included."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None


class SamplingParams(BaseModel):
    """How the model samples."""

    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    max_tokens: int = Field(512, ge=1, le=32768, description="The most tokens of one answer.")
    stop: Annotated[list[str], Field(fail_fast=True)] | None = None
    logprobs: bool = True


class Hints(BaseModel):
    """For agents and tools; the keys below also mean something to the server. A key that is null counts as absent."""

    model_config = ConfigDict(extra="allow")

    agent: str | None = Field(None, description="The agent to run; the server's default one if absent.")
    max_assistant_turns: Hint | None = Field(None, description="Lowers max_turns.")
    max_user_turns: Hint | None = Field(None, description="Bounds the turns that ran tools.")
    budget_tokens: Hint | None = Field(None, description="Lowers max_tokens_total.")
    timeout_seconds: Annotated[float, Field(strict=True, gt=0, le=10**8)] | None = Field(
        None, description="Time limit of the rollout."
    )
    on_drift: Literal["warn", "fail"] | None = Field(
        None, description="What to do when the prompt that the trainer saw is not the one predicted."
    )


class Metadata(Hints):
    """For agents and tools; the keys below also mean something to the server. A key that is null counts as absent."""

    debug_trace: Annotated[Any, WithJsonSchema({"type": "boolean"})] = Field(
        False, description="true: `extra_fields.trace` of the answer tells turn by turn what happened."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Switches of the chat template.")


class RolloutBody(BaseModel):
    """Asks for a rollout of the synchronous dialect. Unknown keys are ignored."""

    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE]})

    rollout_id: RolloutId
    server_url: ServerUrl = Field(description="The trainer; it answers POST {server_url}/v1/chat/completions.")
    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    sampling_params: SamplingParams
    tokenizer_name: str = Field(description="The tokenizer of the trainer's model.")
    tokenizer_revision: str | None = None
    max_turns: int = Field(10, ge=1, le=100)
    max_tokens_total: int = Field(8192, ge=1, le=1_000_000, description="Generated tokens of all turns together.")
    tool_server_url: str | None = None
    callback_api_key: Secret = Field(None, description="Sent to the trainer as a bearer token.")
    metadata: Metadata = Field(default_factory=Metadata)


@dataclass(frozen=True, slots=True)
class ParsedRollout:
    """A valid body: its values, and the texts that travel on verbatim (empty where the body has none)."""

    body: RolloutBody
    messages: tuple[str, ...]
    metadata_json: str
    template_kwargs_json: str


class _SyncSlices(msgspec.Struct):
    messages: msgspec.Raw
    metadata: msgspec.Raw = msgspec.Raw()


class _MetadataSlices(msgspec.Struct):
    chat_template_kwargs: msgspec.Raw = msgspec.Raw()


def parse_rollout(content: bytes, max_metadata_bytes: int) -> ParsedRollout:
    """Reads the body of `POST /rollout`.

    Raises InvalidBody. JSON is what RFC 8259 calls so (no NaN, no lone surrogates), in UTF-8, with integers of any size.
    """
    body = validated(RolloutBody, content)
    slices = msgspec.json.decode(content, type=_SyncSlices)
    metadata = bytes(slices.metadata)
    bound_metadata(metadata, max_metadata_bytes)
    kwargs = b""
    if body.metadata.chat_template_kwargs is not None:
        kwargs = bytes(msgspec.json.decode(metadata, type=_MetadataSlices).chat_template_kwargs)
    return ParsedRollout(
        body=body,
        messages=sliced(slices.messages),
        metadata_json=metadata.decode(),
        template_kwargs_json=kwargs.decode(),
    )


def demand_json(request: Request) -> None:
    """Raises InvalidBody for other content types, which a web page could send from a browser without being asked."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise InvalidBody([violation("content_type", (), "The Content-Type must be application/json")])


def validated(model: type[_Model], content: bytes) -> _Model:
    """The values of a body. Raises InvalidBody, which names its first faults but repeats no value."""
    values = _decoded(content)
    if isinstance(values, dict):
        bound_messages(values.get("messages"))
    try:
        return model.model_validate(values)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        raise InvalidBody([_violation(each) for each in found]) from None


def bound_messages(messages: Any) -> None:
    """Raises InvalidBody for more messages than a rollout may begin with; each of them may be wrong."""
    if isinstance(messages, list) and len(messages) > MAX_MESSAGES:
        raise InvalidBody([violation("too_long", ("messages",), f"At most {MAX_MESSAGES} messages")])


def bound_metadata(text: bytes, most: int) -> None:
    """Raises InvalidBody for metadata that has more bytes in the body than are allowed."""
    if len(text) > most:
        raise InvalidBody([violation("too_long", ("metadata",), f"At most {most} bytes as JSON")])


def sliced(messages: msgspec.Raw) -> tuple[str, ...]:
    """A list as the texts of its members, each as it stands in the body."""
    return tuple(bytes(message).decode() for message in msgspec.json.decode(messages, type=list[msgspec.Raw]))


def violation(kind: str, loc: tuple[str | int, ...], message: str) -> dict[str, Any]:
    """One entry of a 422's `detail`; `loc` is the place within the body."""
    return {"type": kind, "loc": ("body", *loc), "msg": message}


def first_of(violations: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first violations, and how many more there are."""
    first, more = list(violations[:MAX_VIOLATIONS]), len(violations) - MAX_VIOLATIONS
    return [*first, violation("too_many", (), f"{more} more are not listed")] if more > 0 else first


def _violation(error: Any) -> dict[str, Any]:
    found = violation(error["type"], error["loc"], error["msg"])
    # Of a validator of ours it holds the exception itself, which says no more than the message.
    if "ctx" in error and error["type"] != "value_error":
        found["ctx"] = error["ctx"]
    return found


def _decoded(content: bytes) -> Any:
    try:
        values = json.loads(content.decode(), parse_int=_integer)
        # The stricter reader: it also refuses what json.loads lets pass, in every corner of the body.
        msgspec.json.decode(content, type=msgspec.Raw)
    except json.JSONDecodeError as error:
        raise _not_json((error.pos,), error.msg) from None
    except UnicodeDecodeError as error:
        raise _not_json((error.start,), "not UTF-8") from None
    except msgspec.DecodeError as error:
        raise _not_json((), str(error)) from None
    except RecursionError:
        raise _not_json((), "nested too deeply") from None
    return values


def _not_json(loc: tuple[int, ...], reason: str) -> InvalidBody:
    return InvalidBody([violation("json_invalid", loc, f"JSON decode error: {reason}")])


def _integer(digits: str) -> int:
    if len(digits) <= _MAX_DIGITS:
        return int(digits)
    return -_HUGE if digits.startswith("-") else _HUGE
