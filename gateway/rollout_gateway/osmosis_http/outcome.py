"""Outcomes as JSON: the response of the synchronous HTTP API and the final callback of the asynchronous HTTP API.

This module imports only protos and msgspec, because the server's delivery of outcomes uses it too.
"""

import logging
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from osmosis.rollout.v1 import outcome_pb2 as pb
from osmosis.rollout.v1.rollout_service_pb2 import Rollout

from rollout_gateway.message_json import message_json

_LOG = logging.getLogger(__name__)

# NOT_REPLAYABLE and values of later versions become internal_error, as the contract requires of readers.
_ENDPOINTS: Final = ("TRAINER_SERVER", "TRAINER_CLIENT", "ENGINE_SERVER", "ENGINE_CLIENT")
_CATEGORIES: Final[Mapping[int, str]] = {
    pb.FailureCategory.Value(f"FAILURE_CATEGORY_{name}"): f"{name}{suffix}".lower()
    for suffix, names in {
        "_ERROR": ("TOKENIZER", "NETWORK", "TOOL", "VALIDATION", *_ENDPOINTS),
        "": ("RATE_LIMITED", "TIMEOUT", "INTERRUPTED", "TOKEN_DRIFT"),
    }.items()
    for name in names
}
_INTERNAL: Final = "internal_error"

#: Names of the metrics in the two HTTP APIs, with their proto fields.
METRICS: Final[Mapping[str, str]] = {
    "total_latency_ms": "total_ms",
    "llm_latency_ms": "completion_ms",
    "tool_latency_ms": "tool_ms",
    "num_llm_calls": "turns",
    "num_tool_calls": "tool_calls",
    "prompt_tokens": "prompt_tokens",
    "response_tokens": "generated_tokens",
    "max_context_tokens": "max_context_tokens",
}


def rollout_response(rollout_id: str, outcome: pb.Outcome, trace: list[dict[str, Any]] | None = None) -> bytes:
    """Return the JSON response of `POST /rollout`. Reward and trace are in its `extra_fields`."""
    extra = _extra_fields(outcome)
    if outcome.HasField("reward"):
        extra["reward"] = outcome.reward
    if trace is not None:
        extra["trace"] = trace
    return msgspec.json.encode(_result(rollout_id, outcome, extra))


def completed_body(rollout: Rollout) -> bytes:
    """Return the JSON body of the callback `POST {url}/v1/rollout/completed` for a finished rollout.

    The rollout must include the outcome with its messages. The API requires that `error_message` and `reward` are absent
    rather than null.
    """
    outcome = rollout.outcome
    extra = _extra_fields(outcome)
    body = _result(rollout.spec.rollout_id, outcome, extra)
    # A failed rollout has no messages here, unless its agent adds them as an extra field.
    if not outcome.HasField("stop"):
        body["final_messages"] = extra.pop("final_messages", [])
    if outcome.HasField("reward"):
        body["reward"] = outcome.reward
    return msgspec.json.encode({key: value for key, value in body.items() if value is not None})


def _result(rollout_id: str, outcome: pb.Outcome, extra: dict[str, Any]) -> dict[str, Any]:
    completed = outcome.HasField("stop")
    return {
        "rollout_id": rollout_id,
        "status": "COMPLETED" if completed else "ERROR",
        "final_messages": [message_json(message) for message in outcome.messages] if completed else [],
        "finish_reason": outcome.stop.reason if completed else "error",
        "error_message": None if completed else _error_message(outcome),
        "metrics": {key: getattr(outcome.metrics, name) for key, name in METRICS.items()},
        "extra_fields": extra,
    }


def _error_message(outcome: pb.Outcome) -> str:
    if outcome.HasField("cancellation"):
        return f"The rollout was cancelled: {outcome.cancellation.reason or 'no reason was given'}"
    return outcome.failure.message or "The rollout failed"


def _extra_fields(outcome: pb.Outcome) -> dict[str, Any]:
    """Return the extra fields that are set. The protocol's keys override an agent's keys of the same name."""
    extra: dict[str, Any] = dict(_agent_extra(outcome.extra_json))
    if outcome.scores:
        extra["scores"] = dict(sorted(outcome.scores.items()))
    if outcome.stop.truncated and outcome.stop.reason != "length":  # finish_reason "length" says the same
        extra["truncated"] = True
    if outcome.HasField("cancellation"):
        extra["error_category"] = "cancelled"
    elif not outcome.HasField("stop"):
        extra["error_category"] = _CATEGORIES.get(outcome.failure.category, _INTERNAL)
    if outcome.failure.HasField("http_status"):
        extra["http_status"] = outcome.failure.http_status
    if outcome.warnings:
        extra["warnings"] = [_warning(warning) for warning in outcome.warnings]
    return extra


def _agent_extra(text: str) -> dict[str, msgspec.Raw]:
    if not text:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError) as error:
        # A malformed extra field must not cost the client the outcome.
        _LOG.warning("the outcome's extra_json is not a JSON object and was left out: %s", error)
        return {}


def _warning(warning: pb.Warning) -> dict[str, Any]:
    found: dict[str, Any] = {"code": warning.code, "message": warning.message, "turn": warning.turn}
    if warning.HasField("index"):
        found["index"] = warning.index
    return found
