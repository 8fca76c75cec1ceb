"""Specs -> protos: what a rollout is, as it was settled."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration
from osmosis.rollout.v1 import spec_pb2

from rollout_server.core.limits import Limits
from rollout_server.core.spec import Sampling, Spec, Target
from rollout_server.edge.wire import enums
from rollout_server.edge.wire.message import messages_to_proto


def spec_to_proto(spec: Spec, *, with_messages: bool) -> spec_pb2.RolloutSpec:
    """A spec as it is shown."""
    proto = spec_pb2.RolloutSpec(
        rollout_id=spec.rollout_id,
        group_id=spec.group_id,
        agent=spec.agent,
        messages=messages_to_proto(spec.messages, typed=spec.typed) if with_messages else (),
        completions=_target(spec.completions),
        sampling=sampling_to_proto(spec.sampling),
        limits=limits_to_proto(spec.limits),
        priority=spec.priority,
        metadata_json=spec.metadata_json,
        labels=spec.labels,
        source_json=spec.source_json,
    )
    proto.token_mode = spec.token_mode  # type: ignore[assignment]
    proto.on_interrupt = spec.on_interrupt  # type: ignore[assignment]
    if spec.on_drift is not None:
        proto.on_drift = enums.DRIFT_POLICIES[spec.on_drift]
    if spec.outcome is not None:
        proto.outcome.CopyFrom(_target(spec.outcome))
    if spec.tools is not None:
        proto.tools.CopyFrom(_target(spec.tools))
    if spec.tokenizer is not None:
        name = spec.tokenizer
        proto.tokenizer.name, proto.tokenizer.revision = name.name, name.revision
        proto.tokenizer.template_kwargs_json = name.template_kwargs_json
    if spec.cancel_after_detach is not None:
        proto.cancel_after_detach.CopyFrom(duration(spec.cancel_after_detach))
    return proto


def duration(seconds: float) -> Duration:
    """Seconds as a duration."""
    whole, rest = divmod(round(seconds * 1e9), 1_000_000_000)
    return Duration(seconds=whole, nanos=rest)


def limits_to_proto(limits: Limits) -> spec_pb2.Limits:
    """Limits as they are shown."""
    return spec_pb2.Limits(
        turns=limits.turns,
        generated_tokens=limits.generated_tokens,
        time=duration(limits.seconds) if limits.seconds is not None else None,
        calls_per_turn=limits.calls_per_turn,
        tool_turns=limits.tool_turns,
        bytes=limits.bytes,
    )


def _target(target: Target) -> spec_pb2.Target:
    return spec_pb2.Target(
        url=target.url,
        dialect=enums.DIALECTS[target.dialect],
        replays_turn_keys=target.replays_turn_keys,
        model=target.model,
    )


def sampling_to_proto(sampling: Sampling) -> spec_pb2.Sampling:
    """How the model samples."""
    return spec_pb2.Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=sampling.max_tokens,
        stop=sampling.stop,
        logprobs=sampling.logprobs,
        extra_json=sampling.extra_json,
    )
