"""Bodies of the plain API: their models, and reading one without touching the JSON in it that is the caller's own.

Messages, metadata and the like stay the texts they came as (`msgspec.Raw`). All else is checked strictly, and a key that
is not known is an error: nobody depends on this API yet, and a typo should not go unnoticed.
"""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Final, TypeVar, get_args

import msgspec
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema

from rollout_gateway.osmosis_http.sync_body import InvalidBody, bound_messages, violation
from rollout_gateway.rest import enums

MAX_UINT32: Final = 2**32 - 1
MAX_SECONDS: Final = 10**9
#: The largest integer that every JSON reader carries exactly.
MAX_EXACT: Final = 2**53
# None of the bodies' objects, labels included, has as many.
_MOST_KEYS: Final = 100
UID_PATTERN: Final = "^[A-Za-z0-9_-]{1,64}$"

_OBJECT: Final = {"type": "object", "additionalProperties": True}
_M = TypeVar("_M", bound=BaseModel)


def _object(value: Any) -> Any:
    if value is not None and not _begins(value, b"{"):
        raise ValueError("must be a JSON object")
    return value


def _objects(value: Any) -> Any:
    if not isinstance(value, list):
        raise ValueError("must be a list of JSON objects")
    return value


def _begins(raw: msgspec.Raw, start: bytes) -> bool:
    return bytes(memoryview(raw)[: len(start)]) == start


def text(raw: msgspec.Raw | None) -> str:
    """The JSON text of a part; empty for one that was not sent."""
    return "" if raw is None else bytes(raw).decode()


RawObject = Annotated[
    msgspec.Raw | None, PlainValidator(_object), WithJsonSchema({"anyOf": [_OBJECT, {"type": "null"}]})
]
RawObjects = Annotated[list[msgspec.Raw], PlainValidator(_objects), WithJsonSchema({"type": "array", "items": _OBJECT})]
Name = Annotated[str, Field(max_length=256)]
Secret = Annotated[
    str | None,
    Field(repr=False, max_length=16_384, json_schema_extra={"format": "password", "writeOnly": True}),
]
Uid = Annotated[str, Field(max_length=64)]


class _Strict(BaseModel):
    """Refuses unknown keys and values of another type. null counts as absent."""

    model_config = ConfigDict(extra="forbid", strict=True)


class EndpointBody(_Strict):
    """An endpoint that the server calls."""

    url: str = Field(
        max_length=4096,
        # The server checks it, and says better what is wrong.
        json_schema_extra={"pattern": "^(https?|grpcs?)://"},
        description="http:, https:, grpc: or grpcs:, with a host, without user name or password.",
    )
    dialect: enums.Dialect | None = Field(None, description="Taken from the URL if absent.")
    bearer: Secret = Field(None, description="Sent there as a bearer token. Never shown again.")
    replays_turn_keys: bool | None = Field(
        None, description="The endpoint answers a repeated turn key with the same answer and generates nothing anew."
    )
    model: Name | None = Field(
        None, description="The model's name there. Needed for the dialects openai, vllm and sglang, refused for others."
    )


class Sampling(_Strict):
    """How the model samples. What is absent is the trainer's to decide."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1, description="The most tokens of one answer.")
    stop: list[str] | None = Field(None, max_length=64)
    logprobs: bool | None = None
    extra: RawObject = Field(None, description="Further parameters, passed on to HTTP trainers key by key.")


class Limits(_Strict):
    """What the rollout may use up. Of these and the agent's own limits the lower hold."""

    turns: int | None = Field(None, ge=0, le=MAX_UINT32)
    generated_tokens: int | None = Field(None, ge=0, le=MAX_EXACT)
    seconds: float | None = Field(None, gt=0, le=MAX_SECONDS, description="From the first turn to the end.")
    calls_per_turn: int | None = Field(None, ge=1, le=MAX_UINT32)
    tool_turns: int | None = Field(None, ge=0, le=MAX_UINT32)
    bytes: int | None = Field(None, ge=1, le=MAX_EXACT, description="Of all messages together.")


class Tokenizer(_Strict):
    """The tokenizer and chat template of the trainer's model."""

    name: Name
    revision: Name | None = None
    template_kwargs: RawObject = Field(None, description="Switches of the chat template.")


class StartRollout(_Strict):
    """Asks for a rollout. Unknown keys are errors, except within messages, metadata, extra, template_kwargs and labels."""

    rollout_id: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        None, description="Your name for the rollout, sent to trainers. The request id if absent, else made up."
    )
    request_id: Name | None = Field(
        None,
        description="Makes retries safe: the same id and body attach to the same rollout. Or sent as header Idempotency-Key.",
    )
    group_id: Name | None = Field(None, description="Rollouts of the same prompt, as you group them.")
    agent: Name | None = Field(None, description="The server's default agent if absent.")
    messages: RawObjects = Field(description="The conversation so far. Goes through untouched, unknown keys included.")
    completions: EndpointBody = Field(description="Who completes: the trainer.")
    outcome: EndpointBody | None = Field(None, description="Who is told the outcome; if absent it is to be fetched.")
    tools: EndpointBody | None = Field(None, description="A ToolService with further tools.")
    sampling: Sampling | None = None
    limits: Limits | None = None
    tokenizer: Tokenizer | None = Field(None, description="Needed for dialect http_masked and for token_mode tokens.")
    token_mode: enums.TokenMode | None = Field(None, description="Who renders: the trainer (messages) or the server.")
    on_drift: enums.DriftPolicy | None = Field(
        None, description="What to do when the prompt that the trainer saw is not ledger + what was appended."
    )
    on_interrupt: enums.InterruptPolicy | None = Field(None, description="What a restart of the server means.")
    cancel_after_detach_seconds: float | None = Field(
        None, ge=0, le=MAX_SECONDS, description="Cancelled once nobody has been attached for so long; never if absent."
    )
    priority: int | None = Field(
        None, ge=-(2**31), le=2**31 - 1, description="Higher runs earlier among those that wait."
    )
    metadata: RawObject = Field(None, description="For agents and tools.")
    labels: dict[str, str] | None = Field(None, max_length=64, description="For selecting rollouts.")


class CancelRollouts(_Strict):
    """Which rollouts to cancel: those that meet every condition that is set. At least one must be."""

    uids: list[Uid] | None = Field(None, max_length=1000)
    rollout_ids: list[Name] | None = Field(None, max_length=1000)
    group_id: Name | None = None
    agent: Name | None = None
    states: list[enums.State] | None = Field(None, max_length=8)
    labels: dict[str, str] | None = Field(None, max_length=64, description="With all of these labels.")
    callers: list[Name] | None = Field(None, max_length=1000, description="Others than yourself need an admin key.")
    all: bool | None = Field(None, description="All rollouts of yours; must be set where no other condition is.")
    reason: str | None = Field(None, max_length=1000, description="Goes into their outcomes.")


class CancelOne(_Strict):
    """Why a rollout is cancelled."""

    reason: str | None = Field(None, max_length=1000, description="Goes into its outcome.")


#: The models of bodies that handlers read raw, for the OpenAPI description.
BODIES: Final = (StartRollout, CancelRollouts, CancelOne)

# The parts of a body that stay texts, by the object that they are in.
_KEPT: Final[Mapping[tuple[str, ...], frozenset[str]]] = MappingProxyType(
    {
        (): frozenset({"metadata"}),
        ("sampling",): frozenset({"extra"}),
        ("tokenizer",): frozenset({"template_kwargs"}),
    }
)


def read_body(content: bytes, model: type[_M]) -> _M:
    """Reads a body into one of `BODIES`. Raises InvalidBody.

    JSON is what RFC 8259 calls so (no NaN, no lone surrogates), in UTF-8; integers in the texts that are kept have any size.
    """
    try:
        # Nothing else would look into the texts that are kept.
        content.decode()
        values = _values((), msgspec.Raw(content))
    except UnicodeDecodeError as error:
        raise _not_json((error.start,), "not UTF-8") from None
    except RecursionError:
        raise _not_json((), "nested too deeply") from None
    try:
        return model.model_validate(values)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
        raise InvalidBody([violation(each["type"], each["loc"], _message(each, model)) for each in found]) from None


def _values(loc: tuple[str, ...], raw: msgspec.Raw) -> dict[str, Any]:
    """An object's values, those of the objects in `_KEPT` down to the parts that stay texts."""
    values: dict[str, Any] = {}
    for key, part in _parsed(loc, raw, dict[str, msgspec.Raw]).items():
        place = (*loc, key)
        if key in _KEPT[loc] and not _begins(part, b"null"):
            values[key] = part
        elif place in _KEPT and _begins(part, b"{"):
            values[key] = _values(place, part)
        elif place == ("messages",) and _begins(part, b"["):
            values[key] = _parsed(place, part, list[msgspec.Raw])
            bound_messages(values[key])
        else:
            values[key] = _parsed(place, part, object)
    return values


def _parsed(loc: tuple[str, ...], raw: msgspec.Raw, kind: Any) -> Any:
    try:
        value = msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise _not_json(loc, str(error)) from None
    if isinstance(value, dict) and len(value) > _MOST_KEYS:
        raise InvalidBody([violation("too_long", loc, f"At most {_MOST_KEYS} keys")])
    return value


def _not_json(loc: tuple[str | int, ...], reason: str) -> InvalidBody:
    return InvalidBody([violation("json_invalid", loc, f"JSON decode error: {reason}")])


def _message(error: Mapping[str, Any], model: type[BaseModel]) -> str:
    """What is wrong; of an unknown key also where it belongs, or where the keys in it do."""
    if error["type"] != "extra_forbidden":
        return str(error["msg"])
    value = error["input"]
    parts = (value, *value.values()) if isinstance(value, dict) else ()
    if error["loc"][-1] in (places := _places(model)):
        return f"is not known here; it belongs {places[error['loc'][-1]]}"
    if any(isinstance(part, dict) and not part.keys().isdisjoint(model.model_fields) for part in parts):
        return "is not known here; the keys of a request belong at the top of the body"
    return "is not known here"


@cache
def _places(model: type[BaseModel]) -> Mapping[str, str]:
    """Where the keys of a body belong."""
    owners: dict[str, list[str]] = {}
    for name, field in model.model_fields.items():
        for kind in get_args(field.annotation) or (field.annotation,):
            for inner in getattr(kind, "model_fields", ()):
                owners.setdefault(inner, []).append(name)
    nested = {name: f"in {' or '.join(owner)}" for name, owner in owners.items()}
    return nested | dict.fromkeys(model.model_fields, "at the top of the body")
