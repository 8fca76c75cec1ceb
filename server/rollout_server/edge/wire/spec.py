"""Conversion of rollout specs to and from protos. Each part of a spec has one function per direction."""

from __future__ import annotations

from dataclasses import fields
from typing import Any
from urllib.parse import urlsplit

from google.protobuf.duration_pb2 import Duration
from osmosis.rollout.v1 import spec_pb2

from rollout_server.core.limits import Limits
from rollout_server.core.message import Message
from rollout_server.core.outcome import FailureClass
from rollout_server.core.spec import (
    Dialect,
    InterruptPolicy,
    Sampling,
    Spec,
    StaleAction,
    Staleness,
    Target,
    TokenizerName,
)
from rollout_server.edge.wire import enums
from rollout_server.edge.wire.message import messages_to_proto

_DIALECTS = {value: dialect for dialect, value in enums.DIALECTS.items()}
_DRIFT_POLICIES = {value: policy for policy, value in enums.DRIFT_POLICIES.items()}
_STALE_ACTIONS = {value: action for action, value in enums.STALE_ACTIONS.items()}
_INTERRUPT_POLICIES = {policy.value: policy for policy in InterruptPolicy}


def spec_to_proto(spec: Spec, *, with_messages: bool) -> spec_pb2.RolloutSpec:
    """Return the proto of a spec, without credentials. `with_messages` includes the conversation."""
    detached = spec.cancel_after_detach
    return spec_pb2.RolloutSpec(
        rollout_id=spec.rollout_id,
        group_id=spec.group_id,
        agent=spec.agent,
        messages=messages_to_proto(spec.messages, typed=spec.typed) if with_messages else (),
        completions=_target_to_proto(spec.completions),
        outcome=_target_to_proto(spec.outcome) if spec.outcome is not None else None,
        tools=_target_to_proto(spec.tools) if spec.tools is not None else None,
        sampling=sampling_to_proto(spec.sampling),
        limits=limits_to_proto(spec.limits),
        tokenizer=_tokenizer_to_proto(spec.tokenizer) if spec.tokenizer is not None else None,
        on_drift=enums.DRIFT_POLICIES[spec.on_drift] if spec.on_drift else spec_pb2.DRIFT_POLICY_UNSPECIFIED,
        on_interrupt=spec.on_interrupt,  # type: ignore[arg-type]
        token_mode=spec.token_mode,  # type: ignore[arg-type]
        cancel_after_detach=duration(detached) if detached is not None else None,
        priority=spec.priority,
        metadata_json=spec.metadata_json,
        labels=spec.labels,
        source_json=spec.source_json,
        train_on=_train_on_to_proto(spec.train_on) if spec.train_on is not None else None,
        group_index=spec.group_index,
        models={name: _target_to_proto(target) for name, target in spec.models.items()},
        staleness=_staleness_to_proto(spec.staleness) if spec.staleness is not None else None,
    )


def spec_from_proto(
    proto: spec_pb2.RolloutSpec, messages: tuple[Message, ...], typed: bool, completions: Target | None = None
) -> Spec:
    """Return the core value of a spec.

    Args:
        messages: the spec's messages, already converted. `typed`: they are in the typed form.
        completions: the target that generates completions if the spec must not name one (TrainerService.Train).
    """
    return Spec(
        rollout_id=proto.rollout_id,
        messages=messages,
        completions=completions or _target_from_proto(proto.completions),
        group_id=proto.group_id,
        agent=proto.agent,
        typed=typed,
        outcome=_target_from_proto(proto.outcome, Dialect.HTTP_PLAIN) if proto.HasField("outcome") else None,
        tools=_target_from_proto(proto.tools, Dialect.MCP) if proto.HasField("tools") else None,
        sampling=sampling_from_proto(proto.sampling),
        limits=_limits_from_proto(proto.limits),
        tokenizer=_tokenizer_from_proto(proto.tokenizer) if proto.HasField("tokenizer") else None,
        on_drift=_DRIFT_POLICIES.get(proto.on_drift),
        on_interrupt=_INTERRUPT_POLICIES.get(proto.on_interrupt, InterruptPolicy.UNSET),
        token_mode=proto.token_mode,
        cancel_after_detach=seconds(proto.cancel_after_detach) if proto.HasField("cancel_after_detach") else None,
        priority=proto.priority,
        metadata_json=proto.metadata_json,
        labels=dict(proto.labels),
        source_json=proto.source_json,
        train_on=_train_on_from_proto(proto.train_on) if proto.HasField("train_on") else None,
        group_index=proto.group_index if proto.HasField("group_index") else None,
        models={name: _target_from_proto(target, Dialect.OPENAI) for name, target in proto.models.items()},
        staleness=_staleness_from_proto(proto.staleness) if proto.HasField("staleness") else None,
    )


def _train_on_to_proto(classes: frozenset[FailureClass]) -> spec_pb2.TrainOn:
    return spec_pb2.TrainOn(classes=sorted(enums.FAILURE_CLASSES[each] for each in classes))


def _train_on_from_proto(proto: spec_pb2.TrainOn) -> frozenset[FailureClass]:
    known = enums.FAILURE_CLASSES_BY_NUMBER
    return frozenset(known[each] for each in proto.classes if each in known)


def _staleness_to_proto(staleness: Staleness) -> spec_pb2.Staleness:
    return spec_pb2.Staleness(max_lag=staleness.max_lag, action=enums.STALE_ACTIONS[staleness.action])


def _staleness_from_proto(proto: spec_pb2.Staleness) -> Staleness:
    return Staleness(proto.max_lag, _STALE_ACTIONS.get(proto.action, StaleAction.KEEP))


def sampling_to_proto(sampling: Sampling) -> spec_pb2.Sampling:
    """Return the proto of sampling parameters."""
    return spec_pb2.Sampling(**fields_of(sampling))


def sampling_from_proto(proto: spec_pb2.Sampling) -> Sampling:
    """Return the core value of sampling parameters."""
    known = _set_fields(proto, "temperature", "top_p", "max_tokens", "logprobs")
    return Sampling(**known, stop=tuple(proto.stop), extra_json=proto.extra_json)


def limits_to_proto(limits: Limits) -> spec_pb2.Limits:
    """Return the proto of limits."""
    return spec_pb2.Limits(
        turns=limits.turns,
        generated_tokens=limits.generated_tokens,
        time=duration(limits.seconds) if limits.seconds is not None else None,
        calls_per_turn=limits.calls_per_turn,
        tool_turns=limits.tool_turns,
        bytes=limits.bytes,
    )


def _limits_from_proto(proto: spec_pb2.Limits) -> Limits:
    known = _set_fields(proto, "turns", "generated_tokens", "calls_per_turn", "tool_turns", "bytes")
    return Limits(**known, seconds=seconds(proto.time) if proto.HasField("time") else None)


def fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name, for a proto that has the same. `asdict` would copy them, which takes longer."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _set_fields(proto: Any, *names: str) -> dict[str, Any]:
    """Return the values of those of the fields that are set."""
    return {name: getattr(proto, name) for name in names if proto.HasField(name)}


def _target_to_proto(target: Target) -> spec_pb2.Target:
    return spec_pb2.Target(
        url=target.url,
        dialect=enums.DIALECTS[target.dialect],
        replays_turn_keys=target.replays_turn_keys,
        model=target.model,
    )


def _target_from_proto(proto: spec_pb2.Target, over_http: Dialect = Dialect.HTTP_MASKED) -> Target:
    """Return a target. `over_http` is the protocol of an HTTP URL if the proto sets none."""
    dialect = _DIALECTS.get(proto.dialect)
    if dialect is None:
        dialect = Dialect.GRPC if _scheme(proto.url).startswith("grpc") else over_http
    return Target(proto.url.rstrip("/"), dialect, proto.replays_turn_keys, proto.model)


def _scheme(url: str) -> str:
    try:
        return urlsplit(url).scheme
    except ValueError:
        return ""


def _tokenizer_to_proto(name: TokenizerName) -> spec_pb2.Tokenizer:
    return spec_pb2.Tokenizer(name=name.name, revision=name.revision, template_kwargs_json=name.template_kwargs_json)


def _tokenizer_from_proto(proto: spec_pb2.Tokenizer) -> TokenizerName:
    return TokenizerName(proto.name, proto.revision, proto.template_kwargs_json)


def duration(seconds: float) -> Duration:
    """Return seconds as a Duration, rounded to the nearest nanosecond."""
    whole, rest = divmod(round(seconds * 1e9), 1_000_000_000)
    return Duration(seconds=whole, nanos=rest)


def seconds(duration: Duration) -> float:
    """Return a Duration in seconds, as the nearest float."""
    return (duration.seconds * 10**9 + duration.nanos) / 10**9
