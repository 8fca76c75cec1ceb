"""A rollout's place on the roster, and selecting among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollout_server.runtime.delivery import DeliveryState
from rollout_server.runtime.rollout import Rollout, RolloutState
from rollout_server.runtime.start_request import Caller


@dataclass(frozen=True, slots=True)
class RegistryEntry:
    """`number` counts up, so lists can be paged while rollouts come and go; `request` is (caller, completion URL, request id)."""

    number: int
    rollout: Rollout
    fingerprint: str
    request: tuple[str, str, str] | None
    until_received: bool


@dataclass(frozen=True, slots=True)
class Selection:
    """Rollouts that `caller` sees and that meet every condition that is set."""

    caller: Caller
    uids: tuple[str, ...] = ()
    rollout_ids: tuple[str, ...] = ()
    group_id: str = ""
    agent: str = ""
    states: tuple[RolloutState, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    delivery_states: tuple[DeliveryState, ...] = ()
    callers: tuple[str, ...] = ()

    def matches(self, rollout: Rollout) -> bool:
        """Whether the rollout meets every condition."""
        spec, delivery = rollout.spec, rollout.delivery
        return (
            self.caller.sees(rollout.caller)
            and (not self.callers or rollout.caller in self.callers)
            and (not self.uids or rollout.uid in self.uids)
            and (not self.rollout_ids or spec.rollout_id in self.rollout_ids)
            and (not self.group_id or spec.group_id == self.group_id)
            and (not self.agent or spec.agent == self.agent)
            and (not self.states or rollout.state in self.states)
            and (not self.delivery_states or (delivery is not None and delivery.state in self.delivery_states))
            and all(spec.labels.get(key) == value for key, value in self.labels.items())
        )
