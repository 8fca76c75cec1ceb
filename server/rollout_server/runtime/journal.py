"""The port of the journal: what outlives the process, and how it is written (docs/durability.md).

A change is written in two steps. `Journal.write` takes it at once and without blocking; a commit makes it durable later, together
with other changes. What the outside may rely on waits for the commit: an acceptance, an event, an outcome, a request to a trainer.

Changes that are written without an `await` in between share a commit: all of them are stored, or none.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from rollout_server.core.error import Unavailable
from rollout_server.runtime.log import Entry
from rollout_server.runtime.outcome_delivery import Delivery
from rollout_server.runtime.ports import Credentials
from rollout_server.runtime.start_request import StartRequest


class JournalUnusable(Exception):
    """The server cannot start with this journal. The text names the file, what is wrong with it, and what to do."""


class JournalUnavailable(Exception):
    """The journal cannot be written now. The text says which file and why, and what to do."""


def journal_down(text: str) -> Unavailable:
    """Return the error of a request that the journal cannot store now. `text` is that of a `JournalUnavailable`."""
    return Unavailable(text, retry_after=5.0, reason="JOURNAL_UNAVAILABLE")


@dataclass(frozen=True, slots=True)
class AcceptedStart:
    """A rollout as it was accepted.

    Args:
        uid: the server's id of the rollout.
        request: the request, with all defaults filled in. Its credentials are stored apart from it, and encrypted.
        fingerprint: that of the request, for repeated requests; of a member of a group that of the group's request.
        agent_version: version of the agent that runs it.
        created: when it was accepted, in seconds since 1970.
    """

    uid: str
    request: StartRequest
    fingerprint: str
    agent_version: str
    created: float


@dataclass(frozen=True, slots=True)
class StoredDelivery:
    """The delivery of an outcome. Every attempt, also one after a restart, sends the same `body` under the same `key`.

    `expires` is when it is abandoned, in seconds since 1970.
    """

    delivery: Delivery
    key: str
    expires: float
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class FormedGroup:
    """A group of rollouts as it was formed. Its request is that of its members, with the ids that it has here.

    Args:
        uid: the server's id of the group.
        group_id: the callers' name of the group.
        request_id: the idempotency key of its request; empty: none.
        rollout_id: the rollout id of its request, from which those of its members are made.
        min_usable, refill: see `runtime.groups.state.GroupPlan`, whose other values the members have.
        is_listed: callers can find it by its id. Groups of trainer streams are not listed.
        members: uids of its rollouts, by `group_index`.
    """

    uid: str
    group_id: str
    request_id: str
    rollout_id: str
    min_usable: int
    refill: int
    is_listed: bool
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RolloutAccepted:
    """A rollout was accepted. The first change of each rollout."""

    start: AcceptedStart


@dataclass(frozen=True, slots=True)
class EntriesAppended:
    """The log of a rollout has grown. The sequence numbers continue those of the change before without a gap."""

    uid: str
    entries: Sequence[Entry]


@dataclass(frozen=True, slots=True)
class CredentialsChanged:
    """A rollout has other credentials; empty ones delete the stored ones."""

    uid: str
    credentials: Credentials


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """A caller has cancelled the rollout, for this reason."""

    uid: str
    reason: str


@dataclass(frozen=True, slots=True)
class KeyMinted:
    """A key of the model endpoint of the rollout was handed out. `digests` replaces what is stored: see `CaptureSlot`."""

    uid: str
    digests: bytes


@dataclass(frozen=True, slots=True)
class DeliveryChanged:
    """The delivery of a rollout's outcome began, made an attempt, or is over."""

    uid: str
    stored: StoredDelivery


@dataclass(frozen=True, slots=True)
class OutcomeReceived:
    """The outcome of a rollout was acknowledged by its caller."""

    uid: str


@dataclass(frozen=True, slots=True)
class RolloutDropped:
    """The server has forgotten the rollout."""

    uid: str


@dataclass(frozen=True, slots=True)
class GroupFormed:
    """A group was formed of rollouts that were just accepted."""

    group: FormedGroup


@dataclass(frozen=True, slots=True)
class GroupGrew:
    """A rollout was started in place of one that failed.

    `number` counts these rollouts of the group from 1; `index` is the `group_index` of both.
    """

    uid: str
    number: int
    index: int
    member: str


@dataclass(frozen=True, slots=True)
class GroupDropped:
    """The server has forgotten the group. Its rollouts are dropped one by one."""

    uid: str


GroupChange: TypeAlias = GroupFormed | GroupGrew | GroupDropped

RolloutChange: TypeAlias = (
    "RolloutAccepted | EntriesAppended | CredentialsChanged | CancelRequested | KeyMinted | DeliveryChanged | OutcomeReceived"
    " | RolloutDropped"
)

Change: TypeAlias = "RolloutChange | GroupChange"


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """A rollout as the journal has it: `start.request` has its credentials, and `entries` its whole log.

    `cancelled` is the reason of a caller that has cancelled it; None: nobody has. `key_digests` are those of the keys of its model
    endpoint, at most 16 SHA-256 digests in a row; empty: none was handed out.
    """

    start: AcceptedStart
    entries: Sequence[Entry]
    received: bool = False
    stored_delivery: StoredDelivery | None = None
    cancelled: str | None = None
    key_digests: bytes = b""


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group as the journal has it. `refills` are (index, uid of the rollout) in the order of `GroupGrew`."""

    group: FormedGroup
    refills: Sequence[tuple[int, str]] = ()


class Journal(Protocol):
    """Stores changes in their order. Belongs to one event loop."""

    @property
    def server_id(self) -> str:
        """Id of the server, with which its uids begin. A journal on a disk keeps it."""

    @property
    def is_durable(self) -> bool:
        """Whether rollouts survive the process."""

    @property
    def problem(self) -> str:
        """Why the last commit failed and what to do, or empty. The journal tries again by itself."""

    async def load(self) -> Sequence[StoredRollout]:
        """Return the rollouts of earlier processes in the order in which they were accepted. Called once, before any `write`.

        Raises `JournalUnusable`.
        """

    async def load_groups(self) -> Sequence[StoredGroup]:
        """Return the groups of earlier processes in the order in which they were formed. Called once, after `load`.

        Raises `JournalUnusable`.
        """

    def write(self, change: Change, committed: Callable[[], None] | None = None) -> None:
        """Store a change with the next commit. Never blocks. `committed` is called on the event loop after the commit."""

    async def flush(self, *, patient: bool = True) -> None:
        """Wait until all changes so far are committed and their `committed` was called.

        A commit that fails is repeated until it succeeds. `patient`: wait for that, too. Otherwise `JournalUnavailable` is raised.
        """


class MemoryJournal:
    """Keeps nothing: rollouts end with the process. Every change counts as committed at once."""

    is_durable = False
    problem = ""

    def __init__(self) -> None:
        self.server_id = secrets.token_hex(5)

    async def load(self) -> Sequence[StoredRollout]:
        """Return nothing."""
        return ()

    async def load_groups(self) -> Sequence[StoredGroup]:
        """Return nothing."""
        return ()

    def write(self, change: Change, committed: Callable[[], None] | None = None) -> None:
        """Call `committed`."""
        if committed is not None:
            committed()

    async def flush(self, *, patient: bool = True) -> None:
        """Return at once."""
