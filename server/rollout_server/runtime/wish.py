"""What callers wish of a roster, and what it keeps about each rollout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollout_server.core.spec import Spec
from rollout_server.runtime.port import Credentials
from rollout_server.runtime.rollout import Rollout, RolloutState


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much a roster holds.

    Args:
        running: rollouts that run at the same time.
        queued: rollouts that wait for a place; one more is refused.
        finished: finished rollouts that are remembered; the oldest are forgotten first.
        finished_bytes: the same in bytes, counted roughly.
        finished_seconds: how long a finished rollout is remembered.
    """

    running: int = 100
    queued: int = 10_000
    finished: int = 10_000
    finished_bytes: int = 2**30
    finished_seconds: float = 3600.0


@dataclass(frozen=True, slots=True)
class Wish:
    """A request for a rollout.

    Args:
        caller: who asks; sees its own rollouts only.
        request_id: the same id and payload attach to the same rollout; empty: always a new one.
        until_received: the id is free again once the outcome was acknowledged.
    """

    spec: Spec
    caller: str
    request_id: str = ""
    until_received: bool = False
    credentials: Credentials = Credentials()


@dataclass(frozen=True, slots=True)
class Selection:
    """Rollouts that meet every condition that is set."""

    caller: str
    uids: tuple[str, ...] = ()
    rollout_ids: tuple[str, ...] = ()
    group_id: str = ""
    agent: str = ""
    states: tuple[RolloutState, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)

    def matches(self, entry: Place) -> bool:
        """Whether the rollout meets every condition."""
        rollout, spec = entry.rollout, entry.rollout.spec
        return (
            entry.caller == self.caller
            and (not self.uids or rollout.uid in self.uids)
            and (not self.rollout_ids or spec.rollout_id in self.rollout_ids)
            and (not self.group_id or spec.group_id == self.group_id)
            and (not self.agent or spec.agent == self.agent)
            and (not self.states or rollout.state in self.states)
            and all(spec.labels.get(key) == value for key, value in self.labels.items())
        )


@dataclass(frozen=True, slots=True)
class Place:
    """A rollout's place on the roster. `number` counts up, so lists can be paged while rollouts come and go."""

    number: int
    caller: str
    rollout: Rollout
    fingerprint: str
    request: tuple[str, str, str] | None
    until_received: bool
