"""Where a reader of events is, and how it goes on after a cut. Pure: the streams of the clients call and sleep.

A rollout is started once; from then on it is followed by its uid, after the last event seen. So nothing is lost or repeated, and a
server that has forgotten the rollout says so instead of running another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from grpc import StatusCode
from osmosis.rollout.v1.rollout_service_pb2 import (
    RunRolloutRequest,
    RunRolloutResponse,
    StartRolloutResponse,
    WatchRolloutRequest,
    WatchRolloutResponse,
)

from rollout_client.errors import RolloutError, Unavailable
from rollout_client.retry import Attempts

if TYPE_CHECKING:
    from osmosis.rollout.v1.event_pb2 import RolloutEvent
    from osmosis.rollout.v1.message_pb2 import Tool
    from osmosis.rollout.v1.outcome_pb2 import Outcome
    from osmosis.rollout.v1.rollout_service_pb2 import Rollout

_EARLY: Final = "the server ended the stream before the rollout had finished"


@dataclass(frozen=True, slots=True)
class Started:
    """A rollout that was accepted, or found under the same request id.

    Args:
        rollout: as it was then, in view "basic".
        attached: it had been accepted before.
        tools: what its model is to be told of.
    """

    rollout: Rollout
    attached: bool
    tools: tuple[Tool, ...]

    @classmethod
    def from_response(cls, response: StartRolloutResponse) -> Started:
        """The rollout of a response to a start."""
        return cls(response.rollout, response.attached, tuple(response.tools))

    @property
    def uid(self) -> str:
        """The rollout's id on the server."""
        return self.rollout.uid


class StreamState:
    """What a stream of events knows of its rollout."""

    _cursor: EventCursor

    @property
    def uid(self) -> str:
        """The rollout's id on the server; empty until a rollout that is to be started has started."""
        return self._cursor.uid

    @property
    def last_sequence(self) -> int:
        """The sequence number of the last event that came; 0: none did."""
        return self._cursor.last_sequence

    @property
    def outcome(self) -> Outcome | None:
        """The outcome, in as much detail as the events were asked for; None until `finished` has come."""
        return self._cursor.outcome


class EventCursor:
    """The reader of one rollout's events.

    Args:
        watch: how to watch; its uid is empty until the rollout has started.
        attempts: for how long to go on without progress.
        run: how to start the rollout, for one that is to be started.
    """

    def __init__(self, watch: WatchRolloutRequest, attempts: Attempts, run: RunRolloutRequest | None = None) -> None:
        self._watch = watch
        self._attempts = attempts
        self._run = run
        self._seen = False
        self.started: Started | None = None
        self.outcome: Outcome | None = None
        self.over = False

    @property
    def uid(self) -> str:
        """The rollout's; empty until it has started."""
        return self._watch.uid

    @property
    def last_sequence(self) -> int:
        """Of the last event seen."""
        return self._watch.after_sequence

    def run_request(self) -> RunRolloutRequest | None:
        """What starts the rollout; None once it has started, then it is watched."""
        return None if self.started is not None else self._run

    def watch_request(self) -> WatchRolloutRequest:
        """What goes on after the last event seen."""
        return self._watch

    def timeout(self) -> float | None:
        """Seconds that the next call has."""
        return self._attempts.timeout

    def on_connect(self) -> None:
        """The server has answered, if not yet with an item."""
        self._attempts.on_connect()

    def take(self, item: RunRolloutResponse | WatchRolloutResponse) -> RolloutEvent | None:
        """The event in an item; None where there is none, or it was seen before."""
        self._attempts.on_progress()
        if isinstance(item, RunRolloutResponse) and item.HasField("started"):
            self.started = Started.from_response(item.started)
            self._watch.uid = self.started.uid
            return None
        event = item.event
        # Those with the number 0 are not recorded, and come when they come.
        if event.sequence:
            if event.sequence <= self._watch.after_sequence:
                return None
            self._watch.after_sequence = event.sequence
        self._seen = True
        if event.HasField("finished"):
            self.outcome = event.finished.outcome
            self.over = True
        return event

    def on_failure(self, failure: RolloutError) -> float:
        """Seconds to pause after a cut; raises the failure where it is final."""
        try:
            return self._attempts.on_failure(failure)
        except RolloutError:
            self.over = True
            raise

    def on_end(self, request_id: str) -> float:
        """Seconds to pause after a stream that ended by itself. Without an event it is over: none comes after the last one."""
        if not self._seen and self.run_request() is None:
            self.over = True
            return 0.0
        return self.on_failure(Unavailable(StatusCode.UNAVAILABLE, _EARLY, request_id=request_id))
