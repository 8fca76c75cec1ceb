"""What callers wish of a roster."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rollout_server.core.spec import Spec
from rollout_server.runtime.ports import Credentials


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls: sees its own rollouts, and as an admin everybody's."""

    name: str
    admin: bool = False

    def sees(self, owner: str) -> bool:
        """Whether a rollout of `owner` exists for this caller."""
        return self.admin or owner == self.name


@dataclass(frozen=True, slots=True)
class Quota:
    """What one caller may take of a roster; None: as much as there is.

    Args:
        running: rollouts that run at the same time; more wait.
        queued: rollouts that wait while as many run as may; one more is refused.
        bytes: the same of `Capacity.active_bytes`.
        starts_per_minute: rollouts that are started, all of them at once if none was in the minute before.
    """

    running: int | None = None
    queued: int | None = None
    bytes: int | None = None
    starts_per_minute: int | None = None


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much a roster holds.

    Args:
        running: rollouts that run at the same time.
        queued: rollouts that wait for a place; one more is refused.
        active_bytes: what rollouts may hold, counted roughly, until they are among those that are remembered; one more is refused.
        per_caller: what one caller may take of all that.
        shared: among several callers. Of queue and bytes one of them may then take nine tenths, unless `per_caller` says otherwise.
        finished: finished rollouts that are remembered; the oldest are forgotten first. As many outcomes, and one at least, may
            wait for their receivers; then no rollout is taken whose outcome is to be delivered. Those that are held, such as by a
            trainer's stream that owes their outcomes, come on top.
        finished_bytes: the same in bytes, counted roughly.
        finished_seconds: how long a finished rollout is remembered.
    """

    running: int = 100
    queued: int = 10_000
    active_bytes: int = 2**29
    per_caller: Quota = Quota()
    shared: bool = False
    finished: int = 10_000
    finished_bytes: int = 2**30
    finished_seconds: float = 3600.0

    @property
    def total(self) -> int:
        """Rollouts that run and wait."""
        return self.running + self.queued

    def quota(self) -> Quota:
        """What one caller may take. A caller that fills the server leaves room for the first rollouts of another one."""
        own = self.per_caller
        queued, size = (total - total // 10 if self.shared else None for total in (self.queued, self.active_bytes))
        return replace(
            own,
            queued=queued if own.queued is None else own.queued,
            bytes=size if own.bytes is None else own.bytes,
        )


@dataclass(frozen=True, slots=True)
class StartRequest:
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
