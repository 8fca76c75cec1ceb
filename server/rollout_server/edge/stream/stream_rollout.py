"""A rollout on a stream: its pending completions, and how much of its log was sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

from rollout_server.core.outcome import Category
from rollout_server.core.record import RESAMPLED, Note
from rollout_server.edge.stream.pending_requests import LedgerRead, PendingCompletion
from rollout_server.edge.trainer.grpc_client import Rejection, TrainerTokens, TurnCall
from rollout_server.edge.wire.completion import Request, Response
from rollout_server.runtime.rollout import Rollout


class RolloutStream(Protocol):
    """What a rollout is on: a stream."""

    def queue(self, stream_rollout: StreamRollout) -> None:
        """It has a completion that is not under way."""

    def release(self, completion: PendingCompletion) -> None:
        """Nobody waits for this completion any more."""

    def log_grew(self, stream_rollout: StreamRollout) -> None:
        """Its rollout's log has grown."""

    def queue_read(self, ledger_read: LedgerRead) -> None:
        """A segment is to be shown."""

    def drop_read(self, ledger_read: LedgerRead) -> None:
        """Nobody waits for it any more."""


class StreamRollout:
    """One rollout on one stream, or on none once that was not resumed in time. Lives until the rollout's outcome was acknowledged.

    Args:
        sent_events: events that were sent; those up to `confirmed_events` came there for certain.
        announced: the trainer knows that the rollout is on this stream.
        delivered: its outcome is under way.
    """

    def __init__(self, rollout: Rollout, ended: Callable[[StreamRollout], None]) -> None:
        self.rollout = rollout
        self.stream: RolloutStream | None = None
        self.announced = False
        self.delivered = False
        self.sent_events = 0
        self.confirmed_events = 0
        self.completions: dict[str, PendingCompletion] = {}
        self.failure = ""
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

    def fail(self, why: str) -> None:
        """The stream is gone. Asks fail, those under way and those to come."""
        self.stream, self.failure = None, why
        self.detach()
        for completion in self.completions.values():
            completion.fail(Category.NETWORK, why)

    def move_to(self, stream: RolloutStream) -> None:
        """Moves to another stream, from the start of its log. What had been requested is requested again, and the log says so."""
        self.stream, self.announced, self.delivered = stream, False, False
        self.sent_events = self.confirmed_events = 0
        for completion in self.completions.values():
            if completion.put_back() and self.rollout.outcome is None:
                turn = completion.call.turn
                text = f"turn {turn}: asked for again on another stream, so the turn may have been generated twice"
                completion.call.warnings.append((RESAMPLED, text))
                self.rollout.record(Note(turn, RESAMPLED, text))

    async def complete(self, request: Request, call: TurnCall) -> Response | Rejection:
        """What the trainer says. Raises `RolloutFailed` where there is no trainer."""
        completion = PendingCompletion(request.turn_key, request, call, asyncio.get_running_loop().create_future())
        if self.stream is None:
            completion.fail(Category.NETWORK, self.failure)
            return await completion.response
        self.completions[request.turn_key] = completion
        self.stream.queue(self)
        try:
            return await completion.response
        finally:
            del self.completions[request.turn_key]
            completion.stop()
            completion.request = None  # what is kept of it until it is acknowledged is its number
            if self.stream is not None:
                self.stream.release(completion)

    async def read_ledger(self, segment_id: str, seconds: float) -> TrainerTokens | None:
        """A segment as the trainer holds it; None where it does not tell in time."""
        if self.stream is None:
            return None
        ledger_read = LedgerRead(self.rollout.uid, segment_id, asyncio.get_running_loop().create_future())
        self.stream.queue_read(ledger_read)
        try:
            held = await asyncio.wait_for(ledger_read.held, seconds)
        except TimeoutError:
            return None
        finally:
            if self.stream is not None:
                self.stream.drop_read(ledger_read)
        return None if held is None else await asyncio.to_thread(held)

    def next_unsent(self) -> PendingCompletion | None:
        """The oldest completion that is not under way."""
        return next((each for each in self.completions.values() if not each.sent and not each.response.done()), None)

    async def _follow(self) -> None:
        async for _ in self.rollout.log.follow(0):
            if self.stream is not None:
                self.stream.log_grew(self)
        if self.stream is None:
            self._ended(self)
