"""A rollout that this server knows: its machine, its log, how it ends, and who listens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Protocol

from rollout_server.core.machine import Machine
from rollout_server.core.outcome import Cancellation, End, Outcome, RewardResult, Stop
from rollout_server.core.record import Accepted, Ended, Input, Record
from rollout_server.runtime.log import Entry, Log
from rollout_server.runtime.outcome_delivery import Delivery, DeliveryState
from rollout_server.runtime.ports import Clock, Credentials, Tool
from rollout_server.runtime.start_request import AdmittedStart


class RolloutOwner(Protocol):
    """Who keeps rollouts."""

    def on_recorded(self, rollout: Rollout, entries: Sequence[Entry]) -> None:
        """Is told of every entry right after it was added to a rollout's log."""

    def on_released(self, rollout: Rollout) -> None:
        """Nobody holds it any more."""


class RolloutState(Enum):
    """Where a rollout is, as its caller sees it."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"


class RolloutEnding:
    """Whether a rollout is ending, and how: the one place that knows.

    Two things end a rollout that runs, and the first of each kind counts. Somebody requests it: a cancel, its time limit, a drain.
    Or its own run reaches it: a limit, a failed trainer, `finish`, or a `play` that returned. The driver waits for both. A failure
    that was reached holds; a stop that was reached holds unless a request comes before the reward is there. What holds is recorded
    as `Ended`, and from then on the machine has the outcome.

    Attributes:
        requested: the end that somebody requested.
        reached: the end that the run reached. It can ask for nothing more then.
        reward: given together with the end that was reached. The reward of a stop is computed after it instead.
    """

    def __init__(self, machine: Machine) -> None:
        loop = asyncio.get_running_loop()
        self.requested: asyncio.Future[End] = loop.create_future()
        self.reached: asyncio.Future[End] = loop.create_future()
        self.reward = RewardResult()
        self._machine = machine

    @property
    def is_requested(self) -> bool:
        """Somebody requested it, or the rollout has ended."""
        return self.requested.done() or self._machine.outcome is not None

    @property
    def is_reached(self) -> bool:
        """The run reached it, or the rollout has ended."""
        return self.reached.done() or self._machine.outcome is not None

    @property
    def end(self) -> End:
        """The end as the run sees it; a plain stop while there is none."""
        if self.reached.done():
            return self.reached.result()
        outcome = self._machine.outcome
        return outcome.end if outcome is not None else Stop("stop")

    def request(self, end: End) -> None:
        """Wants the rollout to end this way. One that has finished stays as it is."""
        if not self.is_requested:
            self.requested.set_result(end)

    def reach(self, end: End, reward: RewardResult | None = None) -> None:
        """The run ends this way."""
        if not self.reached.done():
            self.reached.set_result(end)
            self.reward = reward or self.reward


class Rollout:
    """Lives on one event loop. Only its own methods change it; what happens in it goes through `record`, and then to its owner."""

    def __init__(
        self, uid: str, admitted: AdmittedStart, tools: Sequence[Tool], clock: Clock, owner: RolloutOwner
    ) -> None:
        request, agent = admitted.request, admitted.agent
        self.uid = uid
        self.spec = request.spec
        self.caller = request.caller
        self.agent = agent
        self.tools = tools
        self.clock = clock
        self.machine = Machine(uid, request.spec.messages, request.spec.limits)
        self.ending = RolloutEnding(self.machine)
        self.log = Log()
        self.created = clock.wall()
        self._credentials = request.credentials
        self._delivery: Delivery | None = None
        self._running = False
        self._received = False
        self._held = False
        self._finished: float | None = None
        self._deadline: float | None = None
        self._owner = owner
        self._queued_at = clock.monotonic()
        self._attached = 0
        self._detach_timer: asyncio.TimerHandle | None = None
        self.record(Accepted(len(request.spec.messages), agent.name, agent.version))
        self._start_detach_timer()

    @property
    def state(self) -> RolloutState:
        """Where it is."""
        if self.outcome is not None:
            return RolloutState.FINISHED
        return RolloutState.RUNNING if self._running else RolloutState.QUEUED

    @property
    def outcome(self) -> Outcome | None:
        """The terminal value, once there is one."""
        return self.machine.outcome

    @property
    def running(self) -> bool:
        """It has a slot, perhaps for a while after its end."""
        return self._running

    @property
    def deadline(self) -> float | None:
        """When its time is over, on the monotonic clock; None: never, or it does not run yet."""
        return self._deadline

    @property
    def finished(self) -> float | None:
        """When it ended, in seconds since 1970."""
        return self._finished

    @property
    def credentials(self) -> Credentials:
        """For its endpoints; empty once nobody is to be called any more."""
        return self._credentials

    @property
    def delivery(self) -> Delivery | None:
        """How far the delivery of its outcome is; None: it is not delivered."""
        return self._delivery

    @property
    def owes(self) -> bool:
        """Its outcome is still to be delivered."""
        return self._delivery is not None and self._delivery.state is DeliveryState.PENDING

    @property
    def received(self) -> bool:
        """Somebody acknowledged its outcome."""
        return self._received

    @property
    def held(self) -> bool:
        """Somebody is still to take note of how it ends, and until then it is not forgotten."""
        return self._held

    def queued_ms(self) -> float:
        """Milliseconds since it was accepted."""
        return 1000 * (self.clock.monotonic() - self._queued_at)

    def record(self, record: Input) -> tuple[Record, ...]:
        """Applies and publishes a record. Returns all that went into the log with it."""
        logged = self.machine.accept(record)
        now = self.clock.wall()
        if isinstance(record, Ended):
            self._finished = now
            self._stop_detach_timer()
        conversation = self.machine.find(record)
        turn, segment = getattr(record, "turn", conversation.turn), conversation.line.segment
        entries = self.log.append(logged, now, turn, segment.id if segment is not None else "")
        self._owner.on_recorded(self, entries)
        return logged

    def take_slot(self) -> None:
        """It begins to run."""
        self._running = True

    def leave_slot(self) -> None:
        """It runs no more."""
        self._running = False

    def limit_time(self, seconds: float) -> None:
        """Sets the deadline that those who work for it keep to."""
        self._deadline = self.clock.monotonic() + seconds

    def update_credentials(self, by: Credentials) -> None:
        """Takes those that `by` brings, as long as they are of use."""
        if self.outcome is None or self.owes:
            self._credentials = self._credentials.updated(by)

    def drop_credentials(self) -> None:
        """Forgets them."""
        self._credentials = Credentials()

    def update_delivery(self, delivery: Delivery) -> None:
        """The delivery of its outcome has come so far."""
        self._delivery = delivery

    def mark_received(self) -> None:
        """Somebody acknowledged its outcome."""
        self._received = True

    def hold(self) -> None:
        """Keeps it from being forgotten, unless it has ended, until `release`."""
        self._held = self.outcome is None or self._held

    def release(self) -> None:
        """Takes `hold` back."""
        if self._held:
            self._held = False
            self._owner.on_released(self)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Somebody listens. When the last one leaves, `cancel_after_detach` begins to run (D6)."""
        self._attached += 1
        self._stop_detach_timer()
        try:
            yield
        finally:
            self._attached -= 1
            self._start_detach_timer()

    def _start_detach_timer(self) -> None:
        grace = self.spec.cancel_after_detach
        if grace is None or self._attached or self.outcome is not None:
            return
        self._detach_timer = asyncio.get_running_loop().call_later(grace, self.ending.request, Cancellation("detached"))

    def _stop_detach_timer(self) -> None:
        if self._detach_timer is not None:
            self._detach_timer.cancel()
            self._detach_timer = None
