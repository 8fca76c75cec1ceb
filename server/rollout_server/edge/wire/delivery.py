"""Outcomes on their way to receivers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from osmosis.rollout.v1 import outcome_service_pb2, rollout_service_pb2

from rollout_server.edge.wire.rollout import rollout_to_proto
from rollout_server.runtime.rollout import Rollout

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
