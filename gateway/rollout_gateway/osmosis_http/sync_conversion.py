"""The synchronous dialect in terms of the contract: bodies to requests. Nowhere else.

Written by hand: canonical proto JSON is not OpenAI-shaped, and messages must pass as the texts they are.
"""

from typing import Final

from osmosis.rollout.v1 import spec_pb2
from osmosis.rollout.v1.event_pb2 import EVENT_DETAIL_OUTCOME
from osmosis.rollout.v1.message_pb2 import Message
from osmosis.rollout.v1.rollout_service_pb2 import (
    REQUEST_MEMORY_UNTIL_RECEIVED,
    RunRolloutRequest,
    StartRolloutRequest,
)

from rollout_gateway.osmosis_http.sync_body import Hints, ParsedRollout
from rollout_gateway.rest.proto_json import duration
from rollout_gateway.settings import GatewaySettings
from rollout_gateway.status import Fields

_MAX_UINT32: Final = 2**32 - 1
_MAX_UINT64: Final = 2**64 - 1

#: Where the fields of a StartRolloutRequest come from in the body.
FIELDS: Final[Fields] = {
    ("request_id",): ("rollout_id",),
    ("rollout_id",): ("rollout_id",),
    ("agent",): ("metadata", "agent"),
    ("messages",): ("messages",),
    ("completions",): ("server_url",),
    ("completions", "url"): ("server_url",),
    ("tools",): ("tool_server_url",),
    ("tools", "url"): ("tool_server_url",),
    ("sampling",): ("sampling_params",),
    ("limits", "turns"): ("max_turns",),
    ("limits", "generated_tokens"): ("max_tokens_total",),
    ("limits", "tool_turns"): ("metadata", "max_user_turns"),
    ("limits", "time"): ("metadata", "timeout_seconds"),
    ("tokenizer",): ("tokenizer_name",),
    ("tokenizer", "name"): ("tokenizer_name",),
    ("tokenizer", "revision"): ("tokenizer_revision",),
    ("tokenizer", "template_kwargs_json"): ("metadata", "chat_template_kwargs"),
    ("on_drift",): ("metadata", "on_drift"),
    ("metadata_json",): ("metadata",),
    ("credentials", "completions_bearer"): ("callback_api_key",),
}

DRIFT: Final = {
    None: spec_pb2.DRIFT_POLICY_UNSPECIFIED,
    "warn": spec_pb2.DRIFT_POLICY_WARN,
    "fail": spec_pb2.DRIFT_POLICY_FAIL,
}


def run_request(parsed: ParsedRollout, settings: GatewaySettings) -> RunRolloutRequest:
    """The call that a valid body asks for."""
    body = parsed.body
    start = StartRolloutRequest(
        request_id=body.rollout_id,
        request_memory=REQUEST_MEMORY_UNTIL_RECEIVED,
        spec=_spec(parsed, settings),
        credentials=spec_pb2.Credentials(completions_bearer=body.callback_api_key or ""),
    )
    return RunRolloutRequest(start=start, detail=EVENT_DETAIL_OUTCOME)


def _spec(parsed: ParsedRollout, settings: GatewaySettings) -> spec_pb2.RolloutSpec:
    body, hints = parsed.body, parsed.body.metadata
    sampling = body.sampling_params
    return spec_pb2.RolloutSpec(
        rollout_id=body.rollout_id,
        agent=hints.agent or "",
        messages=[Message(json=text) for text in parsed.messages],
        completions=spec_pb2.Target(url=body.server_url, dialect=spec_pb2.DIALECT_HTTP_MASKED),
        tools=tool_target(body.tool_server_url),
        sampling=spec_pb2.Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_tokens,
            stop=sampling.stop,
            logprobs=sampling.logprobs,
        ),
        limits=limits(body.max_turns, body.max_tokens_total, hints),
        tokenizer=spec_pb2.Tokenizer(
            name=body.tokenizer_name,
            revision=body.tokenizer_revision or "",
            template_kwargs_json=parsed.template_kwargs_json,
        ),
        on_drift=DRIFT[hints.on_drift],
        cancel_after_detach=duration(settings.detach_grace_seconds),
        metadata_json=parsed.metadata_json,
    )


def limits(turns: int, generated_tokens: int, hints: Hints) -> spec_pb2.Limits:
    """What a rollout may use up: what its body asks for, lowered by the hints. Numbers are clamped to what the contract holds."""
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


def tool_target(url: str | None) -> spec_pb2.Target | None:
    """The tool server of a body. The HTTP dialects know no protocol for one: any but a gRPC server's URL is ignored."""
    if url is None or not url.lower().startswith(("grpc://", "grpcs://")):
        return None
    return spec_pb2.Target(url=url, dialect=spec_pb2.DIALECT_GRPC)
