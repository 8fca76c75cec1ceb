"""The synchronous dialect in terms of the contract: bodies to requests, outcomes to answers. Nowhere else.

Written by hand: canonical proto JSON is not OpenAI-shaped, and messages must pass as the texts they are.
"""

import logging
from collections.abc import Iterable
from typing import Any, Final

import msgspec
from google.protobuf.duration_pb2 import Duration
from osmosis.rollout.v1 import outcome_pb2 as pb
from osmosis.rollout.v1 import spec_pb2
from osmosis.rollout.v1.event_pb2 import EVENT_DETAIL_OUTCOME
from osmosis.rollout.v1.message_pb2 import Message, Tool
from osmosis.rollout.v1.rollout_service_pb2 import (
    REQUEST_MEMORY_UNTIL_RECEIVED,
    RunRolloutRequest,
    StartRolloutRequest,
)

from rollout_gateway.body import Metadata, ParsedRollout, RolloutBody
from rollout_gateway.chat import message_json
from rollout_gateway.settings import GatewaySettings
from rollout_gateway.status import Fields

_LOG = logging.getLogger(__name__)
_MAX_UINT32: Final = 2**32 - 1
_NO_PARAMETERS: Final = b'{"type":"object","properties":{}}'

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

# NOT_REPLAYABLE and values to come read as INTERNAL, as the contract asks of readers.
_CATEGORIES: Final[dict[int, str]] = {
    pb.FAILURE_CATEGORY_TOKENIZER: "tokenizer_error",
    pb.FAILURE_CATEGORY_NETWORK: "network_error",
    pb.FAILURE_CATEGORY_RATE_LIMITED: "rate_limited",
    pb.FAILURE_CATEGORY_TRAINER_SERVER: "trainer_server_error",
    pb.FAILURE_CATEGORY_TRAINER_CLIENT: "trainer_client_error",
    pb.FAILURE_CATEGORY_TOOL: "tool_error",
    pb.FAILURE_CATEGORY_VALIDATION: "validation_error",
    pb.FAILURE_CATEGORY_TIMEOUT: "timeout",
    pb.FAILURE_CATEGORY_INTERRUPTED: "interrupted",
    pb.FAILURE_CATEGORY_TOKEN_DRIFT: "token_drift",
}
_INTERNAL: Final = "internal_error"
_DRIFT: Final = {
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
        tools=_tool_target(body.tool_server_url),
        sampling=spec_pb2.Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_tokens,
            stop=sampling.stop,
            logprobs=sampling.logprobs,
        ),
        limits=_limits(body, hints, settings),
        tokenizer=spec_pb2.Tokenizer(
            name=body.tokenizer_name,
            revision=body.tokenizer_revision or "",
            template_kwargs_json=parsed.template_kwargs_json,
        ),
        on_drift=_DRIFT[hints.on_drift],
        cancel_after_detach=_duration(settings.detach_grace_seconds),
        metadata_json=parsed.metadata_json,
    )


def _limits(body: RolloutBody, hints: Metadata, settings: GatewaySettings) -> spec_pb2.Limits:
    seconds = settings.rollout_seconds if hints.timeout_seconds is None else hints.timeout_seconds
    return spec_pb2.Limits(
        turns=_least(body.max_turns, hints.max_assistant_turns),
        generated_tokens=_least(body.max_tokens_total, hints.budget_tokens),
        tool_turns=None if hints.max_user_turns is None else min(hints.max_user_turns, _MAX_UINT32),
        time=None if seconds is None else _duration(seconds),
    )


def _least(bound: int, hint: int | None) -> int:
    return bound if hint is None else min(bound, hint)


def _tool_target(url: str | None) -> spec_pb2.Target | None:
    # No HTTP protocol for tool servers exists in this dialect: the reference takes the field and ignores it.
    if url is None or not url.lower().startswith(("grpc://", "grpcs://")):
        return None
    return spec_pb2.Target(url=url, dialect=spec_pb2.DIALECT_GRPC)


def _duration(seconds: float) -> Duration:
    return Duration(seconds=int(seconds), nanos=int(seconds % 1 * 1_000_000_000))


def rollout_answer(rollout_id: str, outcome: pb.Outcome, trace: list[dict[str, Any]] | None = None) -> bytes:
    """The JSON answer to `POST /rollout`."""
    completed = outcome.HasField("stop")
    answer = {
        "rollout_id": rollout_id,
        "status": "COMPLETED" if completed else "ERROR",
        "final_messages": [message_json(message) for message in outcome.messages] if completed else [],
        "finish_reason": outcome.stop.reason if completed else "error",
        "error_message": None if completed else _error_message(outcome),
        "metrics": _metrics(outcome.metrics),
        "extra_fields": _extra_fields(outcome, trace),
    }
    return msgspec.json.encode(answer)


def _error_message(outcome: pb.Outcome) -> str:
    if outcome.HasField("cancellation"):
        return f"The rollout was cancelled: {outcome.cancellation.reason or 'no reason was given'}"
    return outcome.failure.message or "The rollout failed"


def _metrics(metrics: pb.Metrics) -> dict[str, float]:
    return {
        "total_latency_ms": metrics.total_ms,
        "llm_latency_ms": metrics.completion_ms,
        "tool_latency_ms": metrics.tool_ms,
        "num_llm_calls": metrics.turns,
        "num_tool_calls": metrics.tool_calls,
        "prompt_tokens": metrics.prompt_tokens,
        "response_tokens": metrics.generated_tokens,
        "max_context_tokens": metrics.max_context_tokens,
    }


def _extra_fields(outcome: pb.Outcome, trace: list[dict[str, Any]] | None) -> dict[str, Any]:
    """Only what there is. The protocol's own keys win over an agent's of the same name."""
    extra: dict[str, Any] = dict(_agent_extra(outcome.extra_json))
    if outcome.HasField("reward"):
        extra["reward"] = outcome.reward
    if outcome.scores:
        extra["scores"] = dict(sorted(outcome.scores.items()))
    if outcome.stop.truncated:
        extra["truncated"] = True
    if outcome.HasField("cancellation"):
        extra["error_category"] = "cancelled"
    elif not outcome.HasField("stop"):
        extra["error_category"] = _CATEGORIES.get(outcome.failure.category, _INTERNAL)
    if outcome.failure.HasField("http_status"):
        extra["http_status"] = outcome.failure.http_status
    if outcome.warnings:
        extra["warnings"] = [_warning(warning) for warning in outcome.warnings]
    if trace is not None:
        extra["trace"] = trace
    return extra


def _agent_extra(text: str) -> dict[str, msgspec.Raw]:
    if not text:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError as error:
        # A rollout's outcome is worth more than an extra that breaks the contract.
        _LOG.warning("the outcome's extra_json is not a JSON object and was left out: %s", error)
        return {}


def _warning(warning: pb.Warning) -> dict[str, Any]:
    found: dict[str, Any] = {"code": warning.code, "message": warning.message, "turn": warning.turn}
    if warning.HasField("index"):
        found["index"] = warning.index
    return found


def tools_answer(tools: Iterable[Tool]) -> bytes:
    """The JSON answer to `GET /tools`."""
    return msgspec.json.encode({"tools": [_tool(tool) for tool in tools]})


def _tool(tool: Tool) -> dict[str, Any]:
    schema = tool.parameters_json_schema.encode() or _NO_PARAMETERS
    function: dict[str, Any] = {
        "name": tool.name,
        "description": tool.description,
        "parameters": msgspec.Raw(schema),
    }
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}
