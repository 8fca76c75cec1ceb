"""Which rollouts: conditions as keywords."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias, TypedDict

from osmosis.rollout.v1.rollout_service_pb2 import Selection

from rollout_client.proto_fields import build

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


def selection(fields: Mapping[str, object]) -> Selection:
    """A selection from keywords. Raises TypeError and ValueError, which name the keyword."""
    return build(Selection, fields)


def selection_to_cancel(uid: str | None, fields: Mapping[str, object]) -> Selection:
    """The same, of at least one condition."""
    chosen = selection({"uid": uid, **fields} if uid is not None else fields)
    if chosen == Selection():
        raise ValueError("nothing is selected; give a uid or a condition, or all=True for all rollouts of yours")
    return chosen
