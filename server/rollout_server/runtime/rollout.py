"""A rollout that this server knows: its machine, its log, and who listens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Protocol

from rollout_server.core.machine import Machine
from rollout_server.core.outcome import Cancellation, End, Outcome
from rollout_server.core.record import Accepted, Ended, Input, Record
from rollout_server.runtime.delivery import Delivery, DeliveryState
from rollout_server.runtime.log import Entry, Log
from rollout_server.runtime.ports import Clock, Tool
from rollout_server.runtime.start_request import AdmittedStart


class RolloutOwner(Protocol):
    """Who keeps rollouts."""

    def recorded(self, rollout: Rollout, entries: Sequence[Entry]) -> None:
        """Is told of every entry right after it was added to a rollout's log."""

    def released(self, rollout: Rollout) -> None:
        """Nobody holds it any more."""


class RolloutState(Enum):
    """Where a rollout is, as its caller sees it."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"


class Rollout:
    """Lives on one event loop. Everything that happens to it goes through `record`, and then to the observer."""

    def __init__(
        self, uid: str, admitted: AdmittedStart, tools: Sequence[Tool], clock: Clock, keeper: RolloutOwner
    ) -> None:
        wish, agent = admitted.wish, admitted.agent
        self.uid = uid
        self.spec = wish.spec
        self.caller = wish.caller
        self.agent = agent
        self.tools = tools
        self.clock = clock
        self.credentials = wish.credentials
        self.machine = Machine(uid, wish.spec.messages, wish.spec.limits)
        self.delivery: Delivery | None = None
        self.log = Log()
        self.running = False
        self.received = False
        self.created = clock.wall()
        self.finished: float | None = None
        self.deadline: float | None = None
        self.ending: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self.held = False
        self._keeper = keeper
        self._queued_at = clock.monotonic()
        self._attached = 0
        self._leaving: asyncio.TimerHandle | None = None
        self.record(Accepted(len(wish.spec.messages), agent.name, agent.version))
        self._wait_for_listener()

    @property
    def state(self) -> RolloutState:
        """Where it is."""
        if self.outcome is not None:
            return RolloutState.FINISHED
        return RolloutState.RUNNING if self.running else RolloutState.QUEUED

    @property
    def outcome(self) -> Outcome | None:
        """The terminal value, once there is one."""
        return self.machine.outcome

    @property
    def owes(self) -> bool:
        """Its outcome is still to be delivered."""
        return self.delivery is not None and self.delivery.state is DeliveryState.PENDING

    def queued_ms(self) -> float:
        """Milliseconds since it was accepted."""
        return 1000 * (self.clock.monotonic() - self._queued_at)

    def record(self, record: Input) -> tuple[Record, ...]:
        """Applies and publishes a record. Returns all that went into the log with it."""
        logged = self.machine.accept(record)
        now = self.clock.wall()
        if isinstance(record, Ended):
            self.finished = now
            self._stop_waiting()
        conversation = self.machine.find(record)
        turn, segment = getattr(record, "turn", conversation.turn), conversation.line.segment
        entries = self.log.append(logged, now, turn, segment.id if segment is not None else "")
        self._keeper.recorded(self, entries)
        return logged

    def ask_to_end(self, end: End) -> None:
        """Wants the rollout to end this way. The first wish counts; one that has finished stays as it is."""
        if self.outcome is None and not self.ending.done():
            self.ending.set_result(end)

    def hold(self) -> None:
        """Somebody is still to take note of how it ends, and until then it is not forgotten."""
        self.held = self.outcome is None or self.held

    def release(self) -> None:
        """Nobody is any more."""
        if self.held:
            self.held = False
            self._keeper.released(self)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Somebody listens. When the last one leaves, `cancel_after_detach` begins to run (D6)."""
        self._attached += 1
        self._stop_waiting()
        try:
            yield
        finally:
            self._attached -= 1
            self._wait_for_listener()

    def _wait_for_listener(self) -> None:
        grace = self.spec.cancel_after_detach
        if grace is None or self._attached or self.outcome is not None:
            return
        self._leaving = asyncio.get_running_loop().call_later(grace, self.ask_to_end, Cancellation("detached"))

    def _stop_waiting(self) -> None:
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None
