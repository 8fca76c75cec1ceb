"""What a rollout is, as JSON: the names of the body that started it, with what the server filled in. Never a credential."""

from typing import Any

import msgspec
from google.protobuf.duration_pb2 import Duration
from osmosis.rollout.v1 import spec_pb2
from osmosis.rollout.v1.message_pb2 import Tool

from rollout_gateway.message_json import message_json
from rollout_gateway.rest import enums


def seconds(duration: Duration) -> float:
    """A duration in seconds."""
    return (duration.seconds * 10**9 + duration.nanos) / 10**9


def spliced(text: str) -> msgspec.Raw:
    """A JSON text of the contract, ready to be spliced into an answer; null where there is none, or what is no JSON."""
    try:
        return msgspec.json.decode(text or "null", type=msgspec.Raw)
    except msgspec.DecodeError:
        # A rollout is worth more than an extra of it that breaks the contract.
        return msgspec.Raw(b"null")


def spec_json(spec: spec_pb2.RolloutSpec, *, messages: bool) -> dict[str, Any]:
    """A spec. What is unset is left out, so it could be sent to start another rollout."""
    found: dict[str, Any] = {"rollout_id": spec.rollout_id}
    found |= {key: getattr(spec, key) for key in ("group_id", "agent") if getattr(spec, key)}
    if messages:
        found["messages"] = [message_json(message) for message in spec.messages]
    for key in ("completions", "outcome", "tools"):
        if spec.HasField(key):
            found[key] = _target(getattr(spec, key))
    if spec.HasField("sampling"):
        found["sampling"] = sampling_json(spec.sampling)
    if spec.HasField("limits"):
        found["limits"] = limits_json(spec.limits)
    if spec.HasField("tokenizer"):
        found["tokenizer"] = _tokenizer(spec.tokenizer)
    found |= _policies(spec)
    if spec.HasField("cancel_after_detach"):
        found["cancel_after_detach_seconds"] = seconds(spec.cancel_after_detach)
    if spec.priority:
        found["priority"] = spec.priority
    if spec.metadata_json:
        found["metadata"] = spliced(spec.metadata_json)
    if spec.labels:
        found["labels"] = dict(sorted(spec.labels.items()))
    return found


def _policies(spec: spec_pb2.RolloutSpec) -> dict[str, str]:
    named = {
        "token_mode": enums.TOKEN_MODES.get(spec.token_mode),
        "on_drift": enums.DRIFT_POLICIES.get(spec.on_drift),
        "on_interrupt": enums.INTERRUPT_POLICIES.get(spec.on_interrupt),
    }
    return {key: word for key, word in named.items() if word is not None}


def _target(target: spec_pb2.Target) -> dict[str, Any]:
    found: dict[str, Any] = {"url": target.url}
    if target.dialect in enums.DIALECTS:
        found["dialect"] = enums.DIALECTS[target.dialect]
    if target.replays_turn_keys:
        found["replays_turn_keys"] = True
    if target.model:
        found["model"] = target.model
    return found


def sampling_json(sampling: spec_pb2.Sampling) -> dict[str, Any]:
    """How the model samples; what is unset is left out."""
    found: dict[str, Any] = _set(sampling, "temperature", "top_p", "max_tokens", "logprobs")
    if sampling.stop:
        found["stop"] = list(sampling.stop)
    if sampling.extra_json:
        found["extra"] = spliced(sampling.extra_json)
    return found


def limits_json(limits: spec_pb2.Limits) -> dict[str, Any]:
    """Limits; those that are unset are left out."""
    found = _set(limits, "turns", "generated_tokens", "calls_per_turn", "tool_turns", "bytes")
    if limits.HasField("time"):
        found["seconds"] = seconds(limits.time)
    return found


def _tokenizer(tokenizer: spec_pb2.Tokenizer) -> dict[str, Any]:
    found: dict[str, Any] = {"name": tokenizer.name}
    if tokenizer.revision:
        found["revision"] = tokenizer.revision
    if tokenizer.template_kwargs_json:
        found["template_kwargs"] = spliced(tokenizer.template_kwargs_json)
    return found


def _set(proto: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(proto, name) for name in names if proto.HasField(name)}


def tool_json(tool: Tool) -> dict[str, Any]:
    """A tool in OpenAI's form."""
    function: dict[str, Any] = {
        "name": tool.name,
        "description": tool.description,
        "parameters": spliced(tool.parameters_json_schema or '{"type":"object","properties":{}}'),
    }
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}
