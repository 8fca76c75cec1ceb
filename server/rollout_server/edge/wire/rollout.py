"""Rollouts and agents -> protos."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from osmosis.rollout.v1 import outcome_service_pb2, rollout_service_pb2

from rollout_server.edge.wire import enums
from rollout_server.edge.wire.event import timestamp
from rollout_server.edge.wire.function_tool import function_tool_json
from rollout_server.edge.wire.message import tool_to_proto, utf8
from rollout_server.edge.wire.outcome import metrics_to_proto, outcome_to_proto
from rollout_server.edge.wire.spec import limits_to_proto, spec_to_proto
from rollout_server.runtime.agent_protocol import AgentProtocol
from rollout_server.runtime.outcome_delivery import Delivery
from rollout_server.runtime.rollout import Rollout


def rollout_to_proto(rollout: Rollout, view: int) -> rollout_service_pb2.Rollout:
    """A rollout as it is now, with as much of it as the view wants."""
    view = view or rollout_service_pb2.ROLLOUT_VIEW_BASIC
    messages = view >= rollout_service_pb2.ROLLOUT_VIEW_MESSAGES
    outcome = rollout.outcome
    proto = rollout_service_pb2.Rollout(
        uid=rollout.uid,
        spec=spec_to_proto(rollout.spec, with_messages=messages),
        state=enums.STATES[rollout.state],
        last_sequence=rollout.log.last_sequence,
        create_time=timestamp(rollout.created),
        metrics=metrics_to_proto(rollout.machine.metrics),
        caller=utf8(rollout.caller),
    )
    if rollout.delivery is not None:
        proto.delivery.CopyFrom(_delivery(rollout.delivery))
    if rollout.finished is not None:
        proto.finish_time.CopyFrom(timestamp(rollout.finished))
    if outcome is not None:
        proto.outcome.CopyFrom(
            outcome_to_proto(
                outcome,
                typed=rollout.spec.typed,
                messages=messages,
                samples=view >= rollout_service_pb2.ROLLOUT_VIEW_SAMPLES,
                segments=view >= rollout_service_pb2.ROLLOUT_VIEW_FULL,
            )
        )
    return proto


def _delivery(delivery: Delivery) -> rollout_service_pb2.Delivery:
    proto = rollout_service_pb2.Delivery(
        state=enums.DELIVERY_STATES[delivery.state], attempts=delivery.attempts, error=utf8(delivery.error)
    )
    if delivery.next_attempt is not None:
        proto.next_attempt_time.CopyFrom(timestamp(delivery.next_attempt))
    if delivery.ended is not None:
        proto.end_time.CopyFrom(timestamp(delivery.ended))
    return proto


def started(
    rollout: Rollout, *, attached: bool, function_tools: bool = False
) -> rollout_service_pb2.StartRolloutResponse:
    """A rollout was accepted or found. `function_tools`: its tools also in the shape that clients validate."""
    tools = [tool_to_proto(tool) for tool in rollout.tools]
    return rollout_service_pb2.StartRolloutResponse(
        rollout=rollout_to_proto(rollout, rollout_service_pb2.ROLLOUT_VIEW_BASIC),
        attached=attached,
        tools=tools,
        function_tools_json=map(function_tool_json, tools) if function_tools else (),
    )


def agent_to_proto(agent: AgentProtocol, *, default: bool) -> rollout_service_pb2.Agent:
    """An agent of this server."""
    return rollout_service_pb2.Agent(
        name=agent.name,
        version=agent.version,
        replayable=agent.replayable,
        tools=[tool_to_proto(tool) for tool in agent.tools],
        limits=limits_to_proto(agent.limits),
        default=default,
        description=agent.description,
    )


WriteBody: TypeAlias = "Callable[[rollout_service_pb2.Rollout], bytes]"
"""Makes the JSON of the final callback."""


def finished_rollout(rollout: Rollout) -> rollout_service_pb2.Rollout:
    """A finished rollout with its messages, as the final callback over HTTP tells of it."""
    return rollout_to_proto(rollout, rollout_service_pb2.ROLLOUT_VIEW_MESSAGES)


def delivery_bytes(rollout: Rollout, key: str) -> bytes:
    """A `DeliverOutcomeRequest`, serialised once: the receiver gets the same bytes on each attempt."""
    proto = rollout_to_proto(rollout, rollout_service_pb2.ROLLOUT_VIEW_SAMPLES)
    proto.ClearField("delivery")  # how it is told is no part of what is told
    request = outcome_service_pb2.DeliverOutcomeRequest(delivery_key=key, rollout=proto)
    return bytes(request.SerializeToString(deterministic=True))
