"""What callers wish of a roster."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_server.core.spec import Spec
from rollout_server.runtime.port import Credentials


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls: sees its own rollouts, and as an admin everybody's."""

    name: str
    admin: bool = False

    def sees(self, owner: str) -> bool:
        """Whether a rollout of `owner` exists for this caller."""
        return self.admin or owner == self.name


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much a roster holds.

    Args:
        running: rollouts that run at the same time.
        queued: rollouts that wait for a place; one more is refused.
        finished: finished rollouts that are remembered; the oldest are forgotten first. As many outcomes, and one at least, may
            wait for their receivers; then no rollout is taken whose outcome is to be delivered. Those that are held, such as by a
            trainer's stream that owes their outcomes, come on top.
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
        caller: the name of who asks; the rollout is theirs.
        request_id: the same id and payload attach to the same rollout; empty: always a new one.
        until_received: the id is free again once the outcome was acknowledged.
    """

    spec: Spec
    caller: str
    request_id: str = ""
    until_received: bool = False
    credentials: Credentials = Credentials()
