"""What the methods of both clients send, made of their arguments. Raises TypeError and ValueError, which name the argument."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, TypeAlias, TypedDict

from osmosis.rollout.v1.rollout_service_pb2 import (
    AcknowledgeOutcomeRequest,
    CancelRolloutsRequest,
    GetRolloutRequest,
    ListRolloutsRequest,
    ListRolloutsResponse,
    ListToolsRequest,
    Rollout,
    RunRolloutRequest,
    Selection,
    WaitRolloutRequest,
    WatchRolloutRequest,
)
from osmosis.rollout.v1.spec_pb2 import RolloutSpec

from rollout_client.connection import timeout_or_infinity
from rollout_client.event_cursor import EventCursor
from rollout_client.proto_fields import build, fill, text
from rollout_client.retry import Attempts, Retry
from rollout_client.spec import start_request
from rollout_client.unary_retry import LongPoll

View: TypeAlias = Literal["basic", "messages", "samples", "full"]
Detail: TypeAlias = Literal["basic", "messages", "full", "outcome"]
State: TypeAlias = Literal["queued", "running", "finished"]
DeliveryState: TypeAlias = Literal["pending", "acknowledged", "refused", "expired"]


class SelectionFields(TypedDict, total=False):
    """Conditions that a rollout meets, all of them. Of a list one is enough; its singular takes one value.

    `labels` are among a rollout's. `all` selects every rollout of the caller's, and `callers` other than oneself need an admin key.
    """

    uid: str
    uids: Sequence[str]
    rollout_id: str
    rollout_ids: Sequence[str]
    group_id: str
    agent: str
    state: State
    states: State | Sequence[State]
    labels: Mapping[str, str]
    all: bool
    delivery_state: DeliveryState
    delivery_states: DeliveryState | Sequence[DeliveryState]
    caller: str
    callers: Sequence[str]


def run_request(
    spec: RolloutSpec | None, fields: Mapping[str, object], after_sequence: int, detail: Detail
) -> RunRolloutRequest:
    """The request that starts a rollout and streams its events after `after_sequence`."""
    start = start_request(spec, fields)
    return build(RunRolloutRequest, {"start": start, "after_sequence": after_sequence, "detail": detail})


def watch_request(uid: str, after_sequence: int, detail: Detail) -> WatchRolloutRequest:
    """The request for the events of a rollout after `after_sequence`."""
    return build(WatchRolloutRequest, {"uid": text(uid, "uid"), "after_sequence": after_sequence, "detail": detail})


def event_cursor(request: RunRolloutRequest | WatchRolloutRequest, timeout: float | None, retry: Retry) -> EventCursor:
    """The reader of a stream."""
    attempts = Attempts(retry, timeout_or_infinity(timeout))
    if isinstance(request, WatchRolloutRequest):
        return EventCursor(request, attempts)
    watch = WatchRolloutRequest(after_sequence=request.after_sequence, detail=request.detail)
    return EventCursor(watch, attempts, request)


def long_poll(uid: str, view: View, timeout: float | None, retry: Retry) -> LongPoll:
    """A wait for a rollout's end."""
    return LongPoll(
        build(WaitRolloutRequest, {"uid": text(uid, "uid"), "view": view}), timeout_or_infinity(timeout), retry
    )


def get_request(uid: str, view: View) -> GetRolloutRequest:
    """The request for one rollout, with as much of it as `view` says."""
    return build(GetRolloutRequest, {"uid": text(uid, "uid"), "view": view})


def cancel_request(uid: str | None, fields: Mapping[str, object], reason: str) -> CancelRolloutsRequest:
    """The request that cancels rollouts. Raises ValueError where nothing is selected."""
    return build(CancelRolloutsRequest, {"selection": cancel_selection(uid, fields), "reason": reason})


def cancel_selection(uid: str | None, fields: Mapping[str, object]) -> Selection:
    """The rollouts to end: at least one condition."""
    chosen = build(Selection, {"uid": uid, **fields} if uid is not None else fields)
    if chosen == Selection():
        raise ValueError("nothing is selected; give a uid or a condition, or all=True for all rollouts of yours")
    return chosen


def acknowledge_request(uid: str) -> AcknowledgeOutcomeRequest:
    """The request that acknowledges the outcome of a rollout."""
    return build(AcknowledgeOutcomeRequest, {"uid": text(uid, "uid")})


def tools_request(agent: str) -> ListToolsRequest:
    """The request for the tools of an agent; an empty name stands for the default agent."""
    return build(ListToolsRequest, {"agent": agent})


class Pages:
    """Rollouts page by page. Pure: whoever iterates asks for `request` and calls `take` with the response."""

    def __init__(self, page_size: int, view: str, fields: Mapping[str, object]) -> None:
        self.request = build(ListRolloutsRequest, {"page_size": page_size, "view": view})
        self.request.selection.CopyFrom(build(Selection, fields))
        self.more = True

    def take(self, page: ListRolloutsResponse) -> Iterator[Rollout]:
        """The rollouts of a page."""
        fill(self.request, {"page_token": page.next_page_token})
        self.more = bool(page.next_page_token)
        return iter(page.rollouts)
