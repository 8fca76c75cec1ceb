"""The port of the journal: what outlives the process, and how it is written (docs/durability.md).

A change is written in two steps. `Journal.write` takes it at once and without blocking; a commit makes it durable later, together
with other changes. What the outside may rely on waits for the commit: an acceptance, an event, an outcome, a request to a trainer.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from rollout_server.runtime.log import Entry
from rollout_server.runtime.outcome_delivery import Delivery
from rollout_server.runtime.ports import Credentials
from rollout_server.runtime.start_request import StartRequest


class JournalUnusable(Exception):
    """The server cannot start with this journal. The text names the file, what is wrong with it, and what to do."""


class JournalUnavailable(Exception):
    """The journal cannot be written now. The text says which file and why, and what to do."""


@dataclass(frozen=True, slots=True)
class AcceptedStart:
    """A rollout as it was accepted.

    Args:
        uid: the server's id of the rollout.
        request: the request, with all defaults filled in. Its credentials are stored apart from it, and encrypted.
        fingerprint: the fingerprint of the request's spec, for repeated requests.
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
class DeliveryChanged:
    """The delivery of a rollout's outcome began, made an attempt, or is over."""

    uid: str
    stored: StoredDelivery


@dataclass(frozen=True, slots=True)
class OutcomeReceived:
    """The outcome of a rollout was acknowledged."""

    uid: str


@dataclass(frozen=True, slots=True)
class RolloutDropped:
    """The server has forgotten the rollout."""

    uid: str


Change: TypeAlias = (
    "RolloutAccepted | EntriesAppended | CredentialsChanged | DeliveryChanged | OutcomeReceived | RolloutDropped"
)


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """A rollout as the journal has it: `start.request` has its credentials, and `entries` its whole log."""

    start: AcceptedStart
    entries: Sequence[Entry]
    received: bool = False
    stored_delivery: StoredDelivery | None = None


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

    def write(self, change: Change, committed: Callable[[], None] | None = None) -> None:
        """Call `committed`."""
        if committed is not None:
            committed()

    async def flush(self, *, patient: bool = True) -> None:
        """Return at once."""
