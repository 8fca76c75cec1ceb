"""Requests of both clients, built from their methods' arguments. Raises TypeError and ValueError that name the argument."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypedDict

from osmosis.rollout.v1.agent_service_pb2 import FinishRolloutRequest
from osmosis.rollout.v1.group_pb2 import GetGroupRequest, StartGroupRequest
from osmosis.rollout.v1.rollout_service_pb2 import (
    AcknowledgeOutcomeRequest,
    CancelRolloutsRequest,
    GetRolloutRequest,
    ListRolloutsRequest,
    ListRolloutsResponse,
    ListToolsRequest,
    RedeliverOutcomesRequest,
    RenderPromptRequest,
    Rollout,
    RunRolloutRequest,
    Selection,
    SetPolicyRequest,
    WaitRolloutRequest,
    WatchGroupRequest,
    WatchRolloutRequest,
)
from osmosis.rollout.v1.spec_pb2 import PolicyUpdate, RolloutSpec

from rollout_client.connection import AUTHORIZATION, CallMetadata, timeout_or_infinity
from rollout_client.enums import DeliveryState, Detail, FailureClass, State, View
from rollout_client.event_cursor import EventCursor, GroupCursor
from rollout_client.proto_fields import build, fill, text
from rollout_client.retry import Attempts, Retry
from rollout_client.spec import start_request
from rollout_client.unary_retry import LongPoll


class SelectionFields(TypedDict, total=False):
    """Filter for rollouts. A rollout matches if it meets every condition; a list condition is met by any of its values.

    A singular name takes one value of the list: `uid="u"` is `uids=["u"]`. `labels` must all be present on the rollout.
    `all=True` selects every rollout of the caller. `callers` other than yourself require an admin key. Only `list` searches
    for a `text`.
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
    failure_class: FailureClass
    failure_classes: FailureClass | Sequence[FailureClass]
    text: str


class WorkResult(TypedDict, total=False):
    """Result of an agent that runs elsewhere.

    `reward` is a finite number; without it, the agent class of the server computes the reward. `scores` are up to 256 named
    components of the reward, and `extra` is one JSON object of further results. `failure` says why the agent failed: a text, or
    `{"message": ..., "failure_class": ...}` with the class "environment" (the default), "policy", "tool" or "deadline". The rollout
    then has no reward.
    """

    reward: float | None
    scores: Mapping[str, float] | None
    extra: Mapping[str, object] | None
    failure: str | Mapping[str, object] | None


def run_request(
    spec: RolloutSpec | None, fields: Mapping[str, object], after_sequence: int, detail: Detail
) -> RunRolloutRequest:
    """Build the request that starts a rollout and streams its events after `after_sequence`."""
    start = start_request(spec, fields)
    return build(RunRolloutRequest, {"start": start, "after_sequence": after_sequence, "detail": detail})


def watch_request(uid: str, after_sequence: int, detail: Detail) -> WatchRolloutRequest:
    """Build the request for the events of a rollout after `after_sequence`."""
    return build(WatchRolloutRequest, {"uid": text(uid, "uid"), "after_sequence": after_sequence, "detail": detail})


def group_request(
    count: int, min_usable: int, refill: int, spec: RolloutSpec | None, fields: Mapping[str, object]
) -> StartGroupRequest:
    """Build the request that starts a group. Raises TypeError for `request_memory`, which groups do not have."""
    if fields.get("request_memory") is not None:
        raise TypeError("request_memory is for single rollouts; the server forgets a group with its rollouts")
    start = start_request(spec, fields)
    return build(
        StartGroupRequest,
        {
            "request_id": start.request_id,
            "spec": start.spec,
            "credentials": start.credentials if start.HasField("credentials") else None,
            "count": count,
            "min_usable": min_usable,
            "refill": refill,
        },
    )


def get_group_request(group_id: str) -> GetGroupRequest:
    """Build the request for one group."""
    return build(GetGroupRequest, {"group_id": text(group_id, "group_id")})


def group_cursor(group_id: str, after_sequence: int, view: View, timeout: float | None, retry: Retry) -> GroupCursor:
    """Create the reader state for the outcomes of a group. `timeout` is in seconds for the whole stream; None: no limit."""
    fields = {"group_id": text(group_id, "group_id"), "after_sequence": after_sequence, "view": view}
    return GroupCursor(build(WatchGroupRequest, fields), Attempts(retry, timeout_or_infinity(timeout)))


def event_cursor(request: RunRolloutRequest | WatchRolloutRequest, timeout: float | None, retry: Retry) -> EventCursor:
    """Create the reader state for a stream. `timeout` is in seconds for the whole stream; None: no limit."""
    attempts = Attempts(retry, timeout_or_infinity(timeout))
    if isinstance(request, WatchRolloutRequest):
        return EventCursor(request, attempts)
    watch = WatchRolloutRequest(after_sequence=request.after_sequence, detail=request.detail)
    return EventCursor(watch, attempts, request)


def long_poll(uid: str, view: View, timeout: float | None, retry: Retry) -> LongPoll:
    """Create the sequence of long polls that waits for a rollout's end. `timeout` is in seconds; None: no limit."""
    return LongPoll(
        build(WaitRolloutRequest, {"uid": text(uid, "uid"), "view": view}), timeout_or_infinity(timeout), retry
    )


def get_request(uid: str, view: View) -> GetRolloutRequest:
    """Build the request for one rollout; `view` selects how much of it is returned."""
    return build(GetRolloutRequest, {"uid": text(uid, "uid"), "view": view})


def cancel_request(uid: str | None, fields: Mapping[str, object], reason: str) -> CancelRolloutsRequest:
    """Build the request that cancels rollouts. Raises ValueError if nothing is selected."""
    return build(CancelRolloutsRequest, {"selection": explicit_selection(uid, fields), "reason": reason})


def explicit_selection(uid: str | None, fields: Mapping[str, object]) -> Selection:
    """Build the selection of a call that changes rollouts. Raises ValueError without any condition."""
    chosen = build(Selection, {"uid": uid, **fields} if uid is not None else fields)
    if chosen == Selection():
        raise ValueError("nothing is selected; give a uid or a condition, or all=True for all your rollouts")
    return chosen


def redeliver_request(uid: str | None, fields: Mapping[str, object]) -> RedeliverOutcomesRequest:
    """Build the request that sends outcomes again. Raises ValueError if nothing is selected."""
    return build(RedeliverOutcomesRequest, {"selection": explicit_selection(uid, fields)})


def acknowledge_request(uid: str) -> AcknowledgeOutcomeRequest:
    """Build the request that acknowledges the outcome of a rollout."""
    return build(AcknowledgeOutcomeRequest, {"uid": text(uid, "uid")})


def finish_request(uid: str, fields: Mapping[str, object]) -> FinishRolloutRequest:
    """Build the request that ends the work of an agent that runs elsewhere. A `failure` may be its message."""
    failure = fields.get("failure")
    if isinstance(failure, str):
        fields = {**fields, "failure": {"message": failure}}
    return build(FinishRolloutRequest, {"uid": text(uid, "uid"), **fields})


def key_metadata(key: str, more: CallMetadata | None) -> CallMetadata:
    """Return the metadata of a call with the key of a rollout instead of the client's API key."""
    return {**(more or {}), AUTHORIZATION: f"Bearer {text(key, 'key')}"}


def policy_request(version: str, step: int | None, paused: bool, completions_url: str) -> SetPolicyRequest:
    """Build the announcement of a policy."""
    policy = {"version": version, "step": step, "paused": paused}
    return build(SetPolicyRequest, {"policy": build(PolicyUpdate, policy), "completions_url": completions_url})


def prompt_request(spec: RolloutSpec | None, fields: Mapping[str, object]) -> RenderPromptRequest:
    """Build the request for the first prompt of a rollout. What `start` sends beside the spec is not sent."""
    return RenderPromptRequest(spec=start_request(spec, fields, needed=("messages",)).spec)


def tools_request(agent: str) -> ListToolsRequest:
    """Build the request for the tools of an agent; an empty name means the default agent."""
    return build(ListToolsRequest, {"agent": agent})


class Pages:
    """Paging state of `list`. No I/O: the caller sends `request` and passes the response to `take`, while `more` is True."""

    def __init__(self, page_size: int, view: str, fields: Mapping[str, object]) -> None:
        self.request = build(ListRolloutsRequest, {"page_size": page_size, "view": view})
        self.request.selection.CopyFrom(build(Selection, fields))
        self.more = True

    def take(self, page: ListRolloutsResponse) -> Iterator[Rollout]:
        """Return the rollouts of a page, and prepare the request for the next one."""
        fill(self.request, {"page_token": page.next_page_token})
        self.more = bool(page.next_page_token)
        return iter(page.rollouts)
