"""What the methods of both clients send, made of their arguments. Raises TypeError and ValueError, which name the argument."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from osmosis.rollout.v1.rollout_service_pb2 import (
    AcknowledgeOutcomeRequest,
    CancelRolloutsRequest,
    GetRolloutRequest,
    ListToolsRequest,
    RunRolloutRequest,
    WaitRolloutRequest,
    WatchRolloutRequest,
)
from osmosis.rollout.v1.spec_pb2 import RolloutSpec

from rollout_client.connection import unlimited
from rollout_client.event_cursor import Following
from rollout_client.proto_fields import build, text
from rollout_client.retry import Attempts, Retry
from rollout_client.selection import selection_to_cancel
from rollout_client.spec import start_request
from rollout_client.unary_retry import Waiting

View: TypeAlias = Literal["basic", "messages", "samples", "full"]
Detail: TypeAlias = Literal["basic", "messages", "full", "outcome"]


def run_request(
    spec: RolloutSpec | None, fields: Mapping[str, object], after_sequence: int, detail: Detail
) -> RunRolloutRequest:
    """Starts a rollout and streams."""
    start = start_request(spec, fields)
    return build(RunRolloutRequest, {"start": start, "after_sequence": after_sequence, "detail": detail})


def watch_request(uid: str, after_sequence: int, detail: Detail) -> WatchRolloutRequest:
    """Streams."""
    return build(WatchRolloutRequest, {"uid": text(uid, "uid"), "after_sequence": after_sequence, "detail": detail})


def following(asked: RunRolloutRequest | WatchRolloutRequest, timeout: float | None, retry: Retry) -> Following:
    """The reader of a stream."""
    attempts = Attempts(retry, unlimited(timeout))
    if isinstance(asked, WatchRolloutRequest):
        return Following(asked, attempts)
    watch = WatchRolloutRequest(after_sequence=asked.after_sequence, detail=asked.detail)
    return Following(watch, attempts, asked)


def waiting(uid: str, view: View, timeout: float | None, retry: Retry) -> Waiting:
    """A wait for a rollout's end."""
    return Waiting(build(WaitRolloutRequest, {"uid": text(uid, "uid"), "view": view}), unlimited(timeout), retry)


def get_request(uid: str, view: View) -> GetRolloutRequest:
    """Reads a rollout."""
    return build(GetRolloutRequest, {"uid": text(uid, "uid"), "view": view})


def cancel_request(uid: str | None, fields: Mapping[str, object], reason: str) -> CancelRolloutsRequest:
    """Ends rollouts."""
    return build(CancelRolloutsRequest, {"selection": selection_to_cancel(uid, fields), "reason": reason})


def acknowledge_request(uid: str) -> AcknowledgeOutcomeRequest:
    """Tells that an outcome was received."""
    return build(AcknowledgeOutcomeRequest, {"uid": text(uid, "uid")})


def tools_request(agent: str) -> ListToolsRequest:
    """Reads an agent's tools."""
    return build(ListToolsRequest, {"agent": agent})
