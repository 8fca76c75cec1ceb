"""Conversion of rollouts, groups and agents to protos."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from osmosis.rollout.v1 import group_pb2, outcome_service_pb2, rollout_service_pb2

from rollout_server.edge.wire import enums
from rollout_server.edge.wire.event import RecordedRollout, timestamp
from rollout_server.edge.wire.function_tool import function_tool_json
from rollout_server.edge.wire.message import tool_to_proto, utf8
from rollout_server.edge.wire.outcome import metrics_to_proto, outcome_to_proto
from rollout_server.edge.wire.spec import fields_of, limits_to_proto, spec_to_proto
from rollout_server.runtime.agent_protocol import AgentProtocol
from rollout_server.runtime.groups.group import FinishedMember, RolloutGroup
from rollout_server.runtime.groups.state import GroupResult
from rollout_server.runtime.log import Log
from rollout_server.runtime.outcome_delivery import Delivery
from rollout_server.runtime.rollout import Rollout, RolloutState


class ListedRollout(RecordedRollout, Protocol):
    """What a list shows of a rollout. Times are in seconds since 1970."""

    @property
    def uid(self) -> str:
        """The server's id."""

    @property
    def caller(self) -> str:
        """Name of the key that started it."""

    @property
    def state(self) -> RolloutState:
        """Its state."""

    @property
    def log(self) -> Log:
        """Its log."""

    @property
    def created(self) -> float:
        """When it was accepted."""

    @property
    def finished(self) -> float | None:
        """When it ended; None until then."""

    @property
    def delivery(self) -> Delivery | None:
        """State of its outcome's delivery."""


def rollout_to_proto(rollout: ListedRollout, view: int) -> rollout_service_pb2.Rollout:
    """Return the current state of a rollout. `view` is a RolloutView."""
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
                rollout.spec,
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
    rollout: Rollout,
    access: rollout_service_pb2.ModelAccess | None = None,
    *,
    attached: bool,
    function_tools: bool = False,
) -> rollout_service_pb2.StartRolloutResponse:
    """Return the response for a rollout that was accepted or found.

    `access`: to its model endpoint, if its agent runs elsewhere.
    `attached`: the rollout had been accepted earlier. `function_tools`: also fill `function_tools_json`.
    """
    tools = [tool_to_proto(tool) for tool in rollout.tools]
    return rollout_service_pb2.StartRolloutResponse(
        rollout=rollout_to_proto(rollout, rollout_service_pb2.ROLLOUT_VIEW_BASIC),
        attached=attached,
        tools=tools,
        access=access,
        function_tools_json=map(function_tool_json, tools) if function_tools else (),
    )


def group_to_proto(group: RolloutGroup) -> group_pb2.Group:
    """Return the current state of a group."""
    members = [
        group_pb2.GroupMember(
            index=index, uid=rollout.uid, rollout_id=rollout.spec.rollout_id, finished=rollout.outcome is not None
        )
        for index, rollout in enumerate(group.members)
    ]
    return group_pb2.Group(
        group_id=group.id,
        members=members,
        min_usable=group.plan.min_usable,
        refill=group.plan.refill,
        last_sequence=group.last_sequence,
        result=group_pb2.GroupResult(**fields_of(group.result)) if group.result is not None else None,
        create_time=timestamp(group.created),
        caller=utf8(group.caller),
    )


def group_item(sequence: int, item: FinishedMember | GroupResult, view: int) -> rollout_service_pb2.WatchGroupResponse:
    """Return an item of WatchGroup. `view` is a RolloutView."""
    if isinstance(item, GroupResult):
        return rollout_service_pb2.WatchGroupResponse(
            sequence=sequence, result=group_pb2.GroupResult(**fields_of(item))
        )
    outcome = rollout_service_pb2.GroupOutcome(
        index=item.rollout.spec.group_index or 0,
        rollout=rollout_to_proto(item.rollout, view),
        usable=item.usable,
        replaced=item.replaced,
    )
    return rollout_service_pb2.WatchGroupResponse(sequence=sequence, outcome=outcome)


def agent_to_proto(agent: AgentProtocol, *, default: bool) -> rollout_service_pb2.Agent:
    """Return the proto of an agent. `default`: it runs if a request names no agent."""
    return rollout_service_pb2.Agent(
        name=agent.name,
        version=agent.version,
        replayable=agent.replayable,
        tools=[tool_to_proto(tool) for tool in agent.offered_tools],
        limits=limits_to_proto(agent.limits),
        default=default,
        description=agent.description,
        external=agent.external,
    )


WriteBody: TypeAlias = "Callable[[rollout_service_pb2.Rollout], bytes]"
"""Returns the JSON body of the final callback over HTTP."""


def finished_rollout(rollout: Rollout) -> rollout_service_pb2.Rollout:
    """Return a finished rollout with its messages, from which the final callback over HTTP is made."""
    return rollout_to_proto(rollout, rollout_service_pb2.ROLLOUT_VIEW_MESSAGES)


def delivery_bytes(rollout: Rollout, key: str) -> bytes:
    """Return a serialized `DeliverOutcomeRequest`. It is serialized once, so each attempt sends the same bytes."""
    proto = rollout_to_proto(rollout, rollout_service_pb2.ROLLOUT_VIEW_SAMPLES)
    proto.ClearField("delivery")  # it changes from attempt to attempt
    request = outcome_service_pb2.DeliverOutcomeRequest(delivery_key=key, rollout=proto)
    return bytes(request.SerializeToString(deterministic=True))
