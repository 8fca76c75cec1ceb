"""A rollout on a stream: its asks, and how much of it was told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from rollout_server.core.outcome import Category, Failure
from rollout_server.core.record import RESAMPLED, Note
from rollout_server.edge.trainer.grpc_client import Held, Rejection, TurnCall
from rollout_server.edge.wire.completion import Request, Response
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.runtime.rollout import Rollout


class RolloutStream(Protocol):
    """What a seat is on: a stream."""

    def want(self, seat: StreamRollout) -> None:
        """It has an ask that is not under way."""

    def over(self, errand: PendingCompletion) -> None:
        """Nobody waits for this ask any more."""

    def look(self, seat: StreamRollout) -> None:
        """Its rollout's log has grown."""

    def show(self, reading: LedgerRead) -> None:
        """A segment is to be shown."""

    def hide(self, reading: LedgerRead) -> None:
        """Nobody waits for it any more."""


@dataclass(slots=True, eq=False)
class PendingCompletion:
    """One ask, until it is over. `sent` is its number on the stream, 0 while it waits; `timer` ends it where nobody answers."""

    key: str
    request: Request | None
    call: TurnCall
    answer: asyncio.Future[Response | Rejection]
    sent: int = 0
    timer: asyncio.TimerHandle | None = None

    def send(self, sequence: int, seconds: float) -> None:
        """It goes out."""
        self.sent = sequence
        self.timer = asyncio.get_running_loop().call_later(seconds, self._late, seconds)

    def put_back(self) -> bool:
        """It is to be sent anew, on another stream. Whether it had been sent."""
        was, self.sent = self.sent, 0
        self.stop()
        return bool(was)

    def stop(self) -> None:
        """The timer is needed no more."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def fail(self, category: Category, text: str) -> None:
        """Ends it, and with it the rollout."""
        if not self.answer.done():
            self.answer.set_exception(
                RolloutFailed(Failure(category, f"turn {self.call.turn}: {text}", self.call.turn))
            )

    def _late(self, seconds: float) -> None:
        text = (
            f"timeout: the trainer did not answer on its stream for {seconds:g} s (ROLLOUT_TRAINER_TIMEOUT_SECONDS). The turn may "
            "have been generated, so it is not asked for again"
        )
        self.fail(Category.TIMEOUT, text)


@dataclass(slots=True, eq=False)
class LedgerRead:
    """A segment that is to be shown; None in the end where it is not."""

    uid: str
    segment_id: str
    held: asyncio.Future[Callable[[], Held | None] | None]


class StreamRollout:
    """One rollout on one stream, or on none once that was not resumed in time. Lives until the rollout's outcome was acknowledged.

    Args:
        told: events that were sent; those up to `arrived` came there for certain.
        announced: the trainer knows that the rollout is on this stream.
        delivered: its outcome is under way.
    """

    def __init__(self, rollout: Rollout, ended: Callable[[StreamRollout], None]) -> None:
        self.rollout = rollout
        self.stream: RolloutStream | None = None
        self.announced = False
        self.delivered = False
        self.told = 0
        self.arrived = 0
        self.errands: dict[str, PendingCompletion] = {}
        self.lost = ""
        self._ended = ended
        self._attached = ExitStack()
        self._following = asyncio.create_task(self._follow(), name=f"follow {rollout.uid}")

    def attach(self) -> None:
        """The trainer is there."""
        self.detach()
        self._attached.enter_context(self.rollout.attached())

    def detach(self) -> None:
        """The trainer is away."""
        self._attached.close()

    def lose(self, why: str) -> None:
        """The stream is gone. Asks fail, those under way and those to come."""
        self.stream, self.lost = None, why
        self.detach()
        for errand in self.errands.values():
            errand.fail(Category.NETWORK, why)

    def move(self, stream: RolloutStream) -> None:
        """Goes over to another stream, from the start of its log. An ask that had been sent is sent anew, and the log says so."""
        self.stream, self.announced, self.delivered = stream, False, False
        self.told = self.arrived = 0
        for errand in self.errands.values():
            if errand.put_back() and self.rollout.outcome is None:
                turn = errand.call.turn
                text = f"turn {turn}: asked for again on another stream, so the turn may have been generated twice"
                errand.call.remarks.append((RESAMPLED, text))
                self.rollout.record(Note(turn, RESAMPLED, text))

    async def ask(self, request: Request, call: TurnCall) -> Response | Rejection:
        """What the trainer says. Raises `RolloutFailed` where there is no trainer."""
        errand = PendingCompletion(request.turn_key, request, call, asyncio.get_running_loop().create_future())
        if self.stream is None:
            errand.fail(Category.NETWORK, self.lost)
            return await errand.answer
        self.errands[request.turn_key] = errand
        self.stream.want(self)
        try:
            return await errand.answer
        finally:
            del self.errands[request.turn_key]
            errand.stop()
            errand.request = None  # what is kept of it until it is acknowledged is its number
            if self.stream is not None:
                self.stream.over(errand)

    async def read(self, segment_id: str, seconds: float) -> Held | None:
        """A segment as the trainer holds it; None where it does not tell in time."""
        if self.stream is None:
            return None
        reading = LedgerRead(self.rollout.uid, segment_id, asyncio.get_running_loop().create_future())
        self.stream.show(reading)
        try:
            held = await asyncio.wait_for(reading.held, seconds)
        except TimeoutError:
            return None
        finally:
            if self.stream is not None:
                self.stream.hide(reading)
        return None if held is None else await asyncio.to_thread(held)

    def waiting(self) -> PendingCompletion | None:
        """The oldest ask that is not under way."""
        return next((each for each in self.errands.values() if not each.sent and not each.answer.done()), None)

    async def _follow(self) -> None:
        async for _ in self.rollout.log.follow(0):
            if self.stream is not None:
                self.stream.look(self)
        if self.stream is None:
            self._ended(self)
