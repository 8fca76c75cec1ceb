"""Conversion of bodies of the synchronous and asynchronous HTTP APIs to protos, and the map from proto fields to body keys."""

from collections.abc import Callable
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from osmosis.rollout.v1 import spec_pb2
from osmosis.rollout.v1.event_pb2 import EVENT_DETAIL_OUTCOME
from osmosis.rollout.v1.message_pb2 import Message
from osmosis.rollout.v1.rollout_service_pb2 import REQUEST_MEMORY_UNTIL_RECEIVED, RunRolloutRequest, StartRolloutRequest
from pydantic import Field, TypeAdapter, ValidationError

from rollout_gateway.json_body import ParsedBody, parts_of
from rollout_gateway.osmosis_http.body import GENERATED_TOKENS, TURNS, Hints, InitBody, RolloutBody
from rollout_gateway.rest.proto_json import duration
from rollout_gateway.settings import GatewaySettings
from rollout_gateway.status import Fields

_MAX_INT32: Final = 2**31 - 1
_MAX_UINT32: Final = 2**32 - 1
_MAX_UINT64: Final = 2**64 - 1
_MAX_STOPS: Final = 64
_DRIFT: Final = {
    None: spec_pb2.DRIFT_POLICY_UNSPECIFIED,
    "warn": spec_pb2.DRIFT_POLICY_WARN,
    "fail": spec_pb2.DRIFT_POLICY_FAIL,
}

_FIELDS: Final[Fields] = {
    ("rollout_id",): ("rollout_id",),
    ("agent",): ("metadata", "agent"),
    ("messages",): ("messages",),
    **dict.fromkeys([("completions",), ("completions", "url")], ("server_url",)),
    **dict.fromkeys([("tools",), ("tools", "url")], ("tool_server_url",)),
    ("limits", "turns"): ("max_turns",),
    ("limits", "generated_tokens"): ("max_tokens_total",),
    ("limits", "tool_turns"): ("metadata", "max_user_turns"),
    ("limits", "time"): ("metadata", "timeout_seconds"),
    ("on_drift",): ("metadata", "on_drift"),
    ("metadata_json",): ("metadata",),
}
#: Place in the body of `POST /rollout` for each field of a StartRolloutRequest.
FIELDS: Final[Fields] = {
    **_FIELDS,
    ("request_id",): ("rollout_id",),
    ("sampling",): ("sampling_params",),
    **dict.fromkeys([("tokenizer",), ("tokenizer", "name")], ("tokenizer_name",)),
    ("tokenizer", "revision"): ("tokenizer_revision",),
    ("tokenizer", "template_kwargs_json"): ("metadata", "chat_template_kwargs"),
    ("credentials", "completions_bearer"): ("callback_api_key",),
}
_BEARERS: Final = (("credentials", "completions_bearer"), ("credentials", "outcome_bearer"))
_INIT_FIELDS: Final[Fields] = {
    **_FIELDS,
    **dict.fromkeys([("outcome",), ("outcome", "url")], ("server_url",)),
    **dict.fromkeys([("sampling",), ("sampling", "extra_json"), ("source_json",)], ("completion_params",)),
    **dict.fromkeys([("credentials",), *_BEARERS], ("api_key",)),
}


def init_fields(body: InitBody) -> Fields:
    """Return the place in a body of `POST /v1/rollout/init` for each field of a StartRolloutRequest."""
    return {**_INIT_FIELDS, ("request_id",): ("idempotency_key" if _own_key(body) else "rollout_id",)}


def run_request(parsed: ParsedBody[RolloutBody], settings: GatewaySettings) -> RunRolloutRequest:
    """Convert a valid body of `POST /rollout`."""
    body, hints = parsed.body, parsed.body.metadata
    spec = spec_pb2.RolloutSpec(
        rollout_id=body.rollout_id,
        agent=hints.agent or "",
        messages=[Message(json=text) for text in parsed.messages],
        completions=spec_pb2.Target(url=body.server_url, dialect=spec_pb2.DIALECT_HTTP_MASKED),
        tools=_tool_target(body.tool_server_url),
        sampling=spec_pb2.Sampling(**dict(body.sampling_params)),
        limits=limits(body.max_turns, body.max_tokens_total, hints),
        tokenizer=spec_pb2.Tokenizer(
            name=body.tokenizer_name,
            revision=body.tokenizer_revision or "",
            template_kwargs_json=parsed.text("metadata", "chat_template_kwargs"),
        ),
        on_drift=_DRIFT[hints.on_drift],
        cancel_after_detach=duration(settings.detach_grace_seconds),
        metadata_json=parsed.text("metadata"),
    )
    start = StartRolloutRequest(
        request_id=body.rollout_id,
        request_memory=REQUEST_MEMORY_UNTIL_RECEIVED,
        spec=spec,
        credentials=spec_pb2.Credentials(completions_bearer=body.callback_api_key or ""),
    )
    return RunRolloutRequest(start=start, detail=EVENT_DETAIL_OUTCOME)


def init_request(parsed: ParsedBody[InitBody]) -> StartRolloutRequest:
    """Convert a valid body of `POST /v1/rollout/init`."""
    body, hints = parsed.body, parsed.body.metadata or Hints()
    key, params = body.api_key or "", parts_of(parsed.parts["completion_params"])
    trainer = spec_pb2.Target(url=body.server_url, dialect=spec_pb2.DIALECT_HTTP_PLAIN)
    turns = TURNS if body.max_turns is None else body.max_turns
    tokens = GENERATED_TOKENS if body.max_tokens_total is None else body.max_tokens_total
    spec = spec_pb2.RolloutSpec(
        rollout_id=body.rollout_id,
        agent=hints.agent or "",
        messages=[Message(json=text) for text in parsed.messages],
        completions=trainer,
        outcome=trainer,
        tools=_tool_target(body.tool_server_url),
        sampling=_sampling(body.completion_params, params),
        limits=limits(turns, tokens, hints),
        on_drift=_DRIFT[hints.on_drift],
        metadata_json=parsed.text("metadata"),
        source_json=_source(body, params),
    )
    credentials = spec_pb2.Credentials(completions_bearer=key, outcome_bearer=key)
    return StartRolloutRequest(
        request_id=_own_key(body) or body.rollout_id, spec=spec, credentials=credentials, include_function_tools=True
    )


def limits(turns: int, generated_tokens: int, hints: Hints) -> spec_pb2.Limits:
    """Return the limits of a rollout: those of its body, lowered by the hints, and clamped to the range of the proto fields."""
    time = hints.timeout_seconds
    return spec_pb2.Limits(
        turns=_clamped(_least(turns, hints.max_assistant_turns), _MAX_UINT32),
        generated_tokens=_clamped(_least(generated_tokens, hints.budget_tokens), _MAX_UINT64),
        tool_turns=None if hints.max_user_turns is None else _clamped(hints.max_user_turns, _MAX_UINT32),
        time=None if time is None else duration(time),
    )


def _least(bound: int, hint: int | None) -> int:
    return bound if hint is None else min(bound, hint)


def _clamped(value: int, most: int) -> int:
    return max(0, min(value, most))


def _tool_target(url: str | None) -> spec_pb2.Target | None:
    """Return the tool server of a body; None unless its URL is gRPC. The two HTTP APIs define no protocol for other servers."""
    if url is None or not url.lower().startswith(("grpc://", "grpcs://")):
        return None
    return spec_pb2.Target(url=url, dialect=spec_pb2.DIALECT_GRPC)


def _own_key(body: InitBody) -> str:
    key = body.idempotency_key or ""
    return key if key.strip() else ""


def _source(body: InitBody, params: dict[str, msgspec.Raw]) -> str:
    """Return the parameters as JSON, as they were sent. Agents of the asynchronous HTTP API read them without defaults."""
    sent = {name: text for name, text in params.items() if name not in _IGNORED}
    named = {"idempotency_key": body.idempotency_key, "tool_server_url": body.tool_server_url}
    others = {name: value for name, value in named.items() if value is not None}
    return msgspec.json.encode({"completion_params": sent, **others}).decode()


class _Parameter(NamedTuple):
    """A sampling parameter with a proto field.

    `reads` converts the value to a number, a bool or strings, and raises ValidationError if it cannot. `holds` returns whether
    the proto field can carry the result. `default` applies if the request lacks the parameter.
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
    "max_tokens": _Parameter(TypeAdapter(int).validate_python, lambda value: 1 <= value <= _MAX_INT32, 512),
    "stop": _Parameter(_texts, lambda value: len(value) <= _MAX_STOPS),
    "logprobs": _Parameter(TypeAdapter(bool).validate_python, lambda value: True, True),
}
# Keys that the protocol itself sets in requests to the trainer, and keys that would turn its response into a stream.
_IGNORED: Final = frozenset({"messages", "rollout_id", "response_mask", "stream", "stream_options"})


def _sampling(values: dict[str, Any], texts: dict[str, msgspec.Raw]) -> spec_pb2.Sampling:
    """Return the sampling parameters, given the parsed `values` and their raw JSON `texts`.

    A value that the proto field cannot carry is passed on unchanged under its name: the asynchronous HTTP API accepts any
    request, and a wrong parameter then fails the rollout.
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
            # A number that was sent as a string is passed on as a number.
            extra[name] = msgspec.Raw(msgspec.json.encode(read)) if isinstance(value, str) else texts[name]
    return spec_pb2.Sampling(**fields, extra_json=msgspec.json.encode(extra).decode() if extra else "")
