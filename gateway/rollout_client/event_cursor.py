"""Position of a reader in a rollout's events, and how it resumes after a lost connection. No I/O: the streams call and sleep.

A rollout is started once. Later connections watch its uid, after the last event received. No event is lost or repeated, and a
server that has forgotten the rollout returns NOT_FOUND instead of running it a second time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from grpc import StatusCode
from osmosis.rollout.v1.event_pb2 import RolloutEvent
from osmosis.rollout.v1.group_pb2 import Group, GroupResult, StartGroupResponse
from osmosis.rollout.v1.rollout_service_pb2 import (
    GetRolloutResponse,
    GroupOutcome,
    RunRolloutRequest,
    RunRolloutResponse,
    StartRolloutResponse,
    WatchGroupRequest,
    WatchGroupResponse,
    WatchRolloutRequest,
    WatchRolloutResponse,
)

from rollout_client.errors import RolloutError, Unavailable
from rollout_client.retry import Attempts

if TYPE_CHECKING:
    from osmosis.rollout.v1.message_pb2 import Tool
    from osmosis.rollout.v1.outcome_pb2 import Outcome
    from osmosis.rollout.v1.rollout_service_pb2 import Rollout

_T = TypeVar("_T")
_EARLY: Final = "the server ended the stream before the rollout had finished"


@dataclass(frozen=True, slots=True)
class ModelAccess:
    """How an agent that runs elsewhere reaches the model endpoint of its rollout.

    Args:
        base_url: base URL for Anthropic clients; OpenAI clients need it with "/v1" appended.
        key: the API key for these clients and for `finish`. It never appears in a repr.
    """

    base_url: str
    key: str = field(repr=False)

    @property
    def mcp_url(self) -> str:
        """URL of an MCP server with the tools of the rollout. Requests need the key as `Authorization: Bearer KEY`."""
        return f"{self.base_url}/mcp"


def access_of(response: StartRolloutResponse | GetRolloutResponse) -> ModelAccess | None:
    """Return the access that a response has, or None."""
    return ModelAccess(response.access.base_url, response.access.key) if response.HasField("access") else None


@dataclass(frozen=True, slots=True)
class Started:
    """Result of `start`: a rollout that was accepted, or found under the same request id.

    Args:
        rollout: its state at that time, in view "basic".
        attached: True if an earlier request had already started it.
        tools: the tools that are offered to the model.
        access: to the model endpoint, if the agent runs elsewhere; None for other agents.
    """

    rollout: Rollout
    attached: bool
    tools: tuple[Tool, ...]
    access: ModelAccess | None = None

    @classmethod
    def from_response(cls, response: StartRolloutResponse) -> Started:
        """Convert the response of StartRollout."""
        return cls(response.rollout, response.attached, tuple(response.tools), access_of(response))

    @property
    def uid(self) -> str:
        """The server's id of the rollout."""
        return self.rollout.uid


@dataclass(frozen=True, slots=True)
class StartedGroup:
    """Result of `start_group`: a group that was accepted, or found under the same request id.

    Args:
        group: its state at that time; `group.members` has the uid of each rollout.
        attached: True if an earlier request had already started it.
    """

    group: Group
    attached: bool

    @classmethod
    def from_response(cls, response: StartGroupResponse) -> StartedGroup:
        """Convert the response of StartGroup."""
        return cls(response.group, response.attached)

    @property
    def group_id(self) -> str:
        """The id of the group."""
        return self.group.group_id


class StreamState:
    """What an event stream knows about its rollout."""

    _cursor: EventCursor

    @property
    def uid(self) -> str:
        """The server's id of the rollout; empty until the rollout has started."""
        return self._cursor.uid

    @property
    def last_sequence(self) -> int:
        """Sequence number of the last event received; 0 before the first, or `after_sequence` if that was given."""
        return self._cursor.last_sequence

    @property
    def outcome(self) -> Outcome | None:
        """The outcome, in the detail requested for events; None until the event `finished` was received."""
        return self._cursor.outcome


class ResumeCursor(ABC, Generic[_T]):
    """Reader state for a stream that resumes.

    Attributes:
        over: nothing further is read.
    """

    def __init__(self, attempts: Attempts) -> None:
        self._attempts = attempts
        self._seen = False
        self.over = False

    def timeout(self) -> float | None:
        """Return the timeout of the next call in seconds; None: no limit."""
        return self._attempts.timeout

    def on_connect(self) -> None:
        """Note that the server accepted the stream, even if no item has arrived."""
        self._attempts.on_connect()

    @abstractmethod
    def take(self, item: object) -> _T | None:
        """Process an item and return what the stream yields for it, or None."""

    def on_failure(self, failure: RolloutError) -> float:
        """Return the seconds to pause before reconnecting. Raises the failure if it is final."""
        try:
            return self._attempts.on_failure(failure)
        except RolloutError:
            self.over = True
            raise

    @abstractmethod
    def on_end(self, request_id: str) -> float:
        """Return the seconds to pause after the server ended the stream without its last item."""


class EventCursor(ResumeCursor[RolloutEvent]):
    """Reader state for one rollout's events.

    Args:
        watch: the request that watches the rollout; its uid is empty until the rollout has started.
        attempts: retry state.
        run: the request that starts the rollout; None to watch an existing one.
    """

    def __init__(self, watch: WatchRolloutRequest, attempts: Attempts, run: RunRolloutRequest | None = None) -> None:
        super().__init__(attempts)
        self._watch = watch
        self._run = run
        self.started: Started | None = None
        self.outcome: Outcome | None = None

    @property
    def uid(self) -> str:
        """The server's id of the rollout; empty until it has started."""
        return self._watch.uid

    @property
    def last_sequence(self) -> int:
        """Sequence number of the last event received."""
        return self._watch.after_sequence

    def run_request(self) -> RunRolloutRequest | None:
        """Return the request that starts the rollout; None once it has started, then use `watch_request`."""
        return None if self.started is not None else self._run

    def watch_request(self) -> WatchRolloutRequest:
        """Return the request for the events after the last one received."""
        return self._watch

    def take(self, item: object) -> RolloutEvent | None:
        """Process an item and return its event; None if it has no event or a repeated one."""
        self._attempts.on_progress()
        if isinstance(item, RunRolloutResponse) and item.HasField("started"):
            self.started = Started.from_response(item.started)
            self._watch.uid = self.started.uid
            return None
        if not isinstance(item, RunRolloutResponse | WatchRolloutResponse):
            raise TypeError(f"{type(item).__name__} is not an item of an event stream")
        event = item.event
        # Sequence 0 marks live events (such as the queue position), which the server does not record or repeat.
        if event.sequence:
            if event.sequence <= self._watch.after_sequence:
                return None
            self._watch.after_sequence = event.sequence
        self._seen = True
        if event.HasField("finished"):
            self.outcome = event.finished.outcome
            self.over = True
        return event

    def on_end(self, request_id: str) -> float:
        """Return the seconds to pause after the server ended the stream without `finished`.

        If a watch after an event ended without any event, the iteration is complete: it began after the last event.
        """
        if self.last_sequence and not self._seen and self.run_request() is None:
            self.over = True
            return 0.0
        return self.on_failure(Unavailable(StatusCode.UNAVAILABLE, _EARLY, request_id=request_id))


class GroupCursor(ResumeCursor[GroupOutcome]):
    """Reader state for the outcomes of a group: like `EventCursor`, without a start.

    Args:
        watch: the request that watches the group.
        attempts: retry state.
    """

    def __init__(self, watch: WatchGroupRequest, attempts: Attempts) -> None:
        super().__init__(attempts)
        self.watch = watch
        self.result: GroupResult | None = None

    def take(self, item: object) -> GroupOutcome | None:
        """Process an item and return its outcome; None for the result, and for an item that was received before."""
        self._attempts.on_progress()
        if not isinstance(item, WatchGroupResponse):
            raise TypeError(f"{type(item).__name__} is not an item of a group's stream")
        if item.sequence <= self.watch.after_sequence:
            return None
        self.watch.after_sequence, self._seen = item.sequence, True
        if item.HasField("outcome"):
            return item.outcome
        if item.HasField("result"):
            self.result, self.over = item.result, True
        return None

    def on_end(self, request_id: str) -> float:
        """Return the seconds to pause after the server ended the stream without the result; see `EventCursor.on_end`."""
        if self.watch.after_sequence and not self._seen:
            self.over = True
            return 0.0
        early = "the server ended the stream before the group had ended"
        return self.on_failure(Unavailable(StatusCode.UNAVAILABLE, early, request_id=request_id))
