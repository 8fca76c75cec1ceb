"""The asynchronous dialect in terms of the contract: bodies to requests, accepted rollouts to answers. Nowhere else."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
from osmosis.rollout.v1 import spec_pb2
from osmosis.rollout.v1.message_pb2 import Message
from osmosis.rollout.v1.rollout_service_pb2 import StartRolloutRequest, StartRolloutResponse
from pydantic import Field, TypeAdapter, ValidationError

from rollout_gateway.osmosis_http.async_body import GENERATED_TOKENS, TURNS, InitBody, ParsedInit
from rollout_gateway.osmosis_http.sync_body import Hints
from rollout_gateway.osmosis_http.sync_conversion import DRIFT, limits, tool_target
from rollout_gateway.osmosis_http.tool_schema import function_tool
from rollout_gateway.status import Fields

_MAX_TOKENS: Final = 2**31 - 1
_MAX_STOPS: Final = 64

_FIELDS: Final[Fields] = {
    ("rollout_id",): ("rollout_id",),
    ("agent",): ("metadata", "agent"),
    ("messages",): ("messages",),
    ("completions",): ("server_url",),
    ("completions", "url"): ("server_url",),
    ("outcome",): ("server_url",),
    ("outcome", "url"): ("server_url",),
    ("tools",): ("tool_server_url",),
    ("tools", "url"): ("tool_server_url",),
    ("sampling",): ("completion_params",),
    ("sampling", "extra_json"): ("completion_params",),
    ("limits", "turns"): ("max_turns",),
    ("limits", "generated_tokens"): ("max_tokens_total",),
    ("limits", "tool_turns"): ("metadata", "max_user_turns"),
    ("limits", "time"): ("metadata", "timeout_seconds"),
    ("on_drift",): ("metadata", "on_drift"),
    ("metadata_json",): ("metadata",),
    ("source_json",): ("completion_params",),
    ("credentials",): ("api_key",),
    ("credentials", "completions_bearer"): ("api_key",),
    ("credentials", "outcome_bearer"): ("api_key",),
}


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A parameter that the contract has a field for.

    Args:
        reads: the value as a number, a flag or texts; raises ValidationError for what is none.
        holds: whether the contract's field can carry it.
        default: the dialect's value for a request without it.
    """

    reads: Callable[[Any], Any]
    holds: Callable[[Any], bool]
    default: Any = None


def _texts(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else _TEXTS.validate_python(value)


_NUMBER: Final = TypeAdapter(Annotated[float, Field(allow_inf_nan=False)])
_TEXTS: Final = TypeAdapter(Annotated[list[str], Field(fail_fast=True)])
_PARAMETERS: Final = {
    "temperature": _Parameter(_NUMBER.validate_python, lambda value: 0 <= value <= 2, 1.0),
    "top_p": _Parameter(_NUMBER.validate_python, lambda value: 0 <= value <= 1, 1.0),
    "max_tokens": _Parameter(TypeAdapter(int).validate_python, lambda value: 1 <= value <= _MAX_TOKENS, 512),
    "stop": _Parameter(_texts, lambda value: len(value) <= _MAX_STOPS),
    "logprobs": _Parameter(TypeAdapter(bool).validate_python, lambda value: True, True),
}
# What the protocol itself sets in a request to the trainer, or what would make its answer another one than the protocol's.
_IGNORED: Final = frozenset({"messages", "rollout_id", "response_mask", "stream", "stream_options"})


def init_request(parsed: ParsedInit) -> StartRolloutRequest:
    """The call that a valid body asks for."""
    body, hints = parsed.body, parsed.body.metadata or Hints()
    key = body.api_key or ""
    trainer = spec_pb2.Target(url=body.server_url, dialect=spec_pb2.DIALECT_HTTP_PLAIN)
    turns = TURNS if body.max_turns is None else body.max_turns
    tokens = GENERATED_TOKENS if body.max_tokens_total is None else body.max_tokens_total
    return StartRolloutRequest(
        request_id=_own_key(body) or body.rollout_id,
        spec=spec_pb2.RolloutSpec(
            rollout_id=body.rollout_id,
            agent=hints.agent or "",
            messages=[Message(json=text) for text in parsed.messages],
            completions=trainer,
            outcome=trainer,
            tools=tool_target(body.tool_server_url),
            sampling=_sampling(body.completion_params, parsed.params),
            limits=limits(turns, tokens, hints),
            on_drift=DRIFT[hints.on_drift],
            metadata_json=parsed.metadata_json,
            source_json=_source(parsed),
        ),
        credentials=spec_pb2.Credentials(completions_bearer=key, outcome_bearer=key),
    )


def init_fields(body: InitBody) -> Fields:
    """Where the fields of the request come from in this body."""
    return {**_FIELDS, ("request_id",): ("idempotency_key" if _own_key(body) else "rollout_id",)}


def _own_key(body: InitBody) -> str:
    key = body.idempotency_key or ""
    return key if key.strip() else ""


def _source(parsed: ParsedInit) -> str:
    """What agents of this dialect read as it was sent: the contract's fields hold the parameters with their defaults."""
    params = {name: text for name, text in parsed.params.items() if name not in _IGNORED}
    named = {"idempotency_key": parsed.body.idempotency_key, "tool_server_url": parsed.body.tool_server_url}
    said = {name: value for name, value in named.items() if value is not None}
    return msgspec.json.encode({"completion_params": params, **said}).decode()


def _sampling(values: dict[str, Any], texts: dict[str, msgspec.Raw]) -> spec_pb2.Sampling:
    """The parameters, `values` as parsed and `texts` as they stand in the body.

    What the contract's fields cannot carry goes on as it is, under its own name: this dialect accepts any request, and a
    parameter that is wrong fails the rollout.
    """
    fields: dict[str, Any] = {}
    extra = {name: text for name, text in texts.items() if name not in _PARAMETERS and name not in _IGNORED}
    for name, parameter in _PARAMETERS.items():
        value = values.get(name)
        if value is None:
            fields[name] = parameter.default
            continue
        try:
            read = parameter.reads(value)
        except ValidationError:
            extra[name] = texts[name]
            continue
        if parameter.holds(read):
            fields[name] = read
        else:
            # A number that came as text goes on as the number it was read as.
            extra[name] = msgspec.Raw(msgspec.json.encode(read)) if isinstance(value, str) else texts[name]
    return spec_pb2.Sampling(**fields, extra_json=msgspec.json.encode(extra).decode() if extra else "")


def init_answer(rollout_id: str, accepted: StartRolloutResponse) -> bytes:
    """The JSON answer to `POST /v1/rollout/init`: the id of the rollout that was found, and its tools.

    `rollout_id` is the request's, for a server that does not tell the rollout's.
    """
    found = accepted.rollout.spec.rollout_id or rollout_id
    return msgspec.json.encode({"rollout_id": found, "tools": [function_tool(tool) for tool in accepted.tools]})
