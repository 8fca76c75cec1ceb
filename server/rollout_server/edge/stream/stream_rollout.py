"""A rollout on a stream: its pending completions, and how much of its log was sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Protocol

from rollout_server.core.error import RolloutError
from rollout_server.core.outcome import Category
from rollout_server.core.record import RESAMPLED, Note
from rollout_server.edge.stream.pending_requests import LedgerRead, PendingCompletion
from rollout_server.edge.trainer.grpc_client import Rejection, TrainerTokens, TurnCall
from rollout_server.edge.wire.completion import Request, Response
from rollout_server.runtime.rollout import Rollout


class RolloutStream(Protocol):
    """The stream that a rollout is on. `detail` is that of the events that are sent; 0: no events."""

    detail: int

    def queue(self, stream_rollout: StreamRollout) -> None:
        """Queue a rollout that has a completion to request."""

    def release(self, completion: PendingCompletion) -> None:
        """Free the credit of a completion that is not needed any more."""

    def log_grew(self, stream_rollout: StreamRollout) -> None:
        """Wake the sender: the rollout has another event, or has ended."""

    def queue_read(self, ledger_read: LedgerRead) -> None:
        """Queue a read of the trainer's ledger."""

    def drop_read(self, ledger_read: LedgerRead) -> None:
        """Remove a read that is not needed any more."""

    def on_activity(self) -> None:
        """Called when something of a rollout has begun, ended, or begun to wait."""


class StreamRollout:
    """One rollout on a stream, or on none: its stream was not resumed in time, or an earlier process of the server started it.

    Lives until the rollout's outcome is acknowledged.

    Args:
        failure: why no trainer completes its turns; empty if it is on a stream, or as long as it waits for one.
        sent_events: number of events that were sent; those up to `confirmed_events` have certainly arrived.
        announced: the trainer knows that the rollout is on this stream.
        delivered: its outcome was sent.
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
        rollout.activity.on_change = self._on_activity
        self._ending = asyncio.create_task(self._await_end(), name=f"await the end of {rollout.uid}")

    def attach(self) -> None:
        """Attach to the rollout: the trainer is connected."""
        self.detach()
        self._attached.enter_context(self.rollout.attached())
        if self.stream is not None and self.stream.detail:
            following = asyncio.create_task(self._follow_events(), name=f"follow {self.rollout.uid}")
            self._attached.callback(following.cancel)

    def detach(self) -> None:
        """Detach from the rollout: the trainer is disconnected."""
        self._attached.close()

    def fail(self, why: str) -> None:
        """Leave it without a stream, because there is no trainer. Pending and later completion requests fail."""
        self.stream, self.failure = None, why
        self.detach()
        for completion in self.completions.values():
            completion.fail(Category.NETWORK, why)

    def stop(self) -> None:
        """Stop waiting for its end: this process of the server does not see it."""
        self._ending.cancel()

    def move_to(self, stream: RolloutStream) -> None:
        """Move to another stream and send its log there from the start.

        Completions that were already requested are requested again. The log notes it, because the turn may be generated twice
        (D8).
        """
        self.stream, self.failure, self.announced, self.delivered = stream, "", False, False
        self.sent_events = self.confirmed_events = 0
        for completion in self.completions.values():
            if completion.put_back() and self.rollout.machine.outcome is None:
                turn = completion.call.turn
                text = f"turn {turn}: requested again on another stream, so the turn may have been generated twice"
                completion.call.warnings.append((RESAMPLED, text))
                self.rollout.record(Note(turn, RESAMPLED, text))

    async def complete(self, request: Request, call: TurnCall) -> Response | Rejection:
        """Request a completion and return the trainer's response. Raise `RolloutFailed` if there is no trainer.

        Without a stream, the request waits until one takes the rollout over.
        """
        completion = PendingCompletion(request.turn_key, request, call, asyncio.get_running_loop().create_future())
        if self.failure:
            completion.fail(Category.NETWORK, self.failure)
            return await completion.response
        self.completions[request.turn_key] = completion
        if self.stream is not None:
            self.stream.queue(self)
        try:
            with self.rollout.activity.waiting(completion.response):
                return await completion.response
        finally:
            del self.completions[request.turn_key]
            completion.stop()
            completion.request = None  # frees the memory: the stream keeps the item until it is acknowledged
            if self.stream is not None:
                self.stream.release(completion)

    async def read_ledger(self, segment_id: str, seconds: float) -> TrainerTokens | None:
        """Return a segment as the trainer stores it; None if the trainer does not send it in time."""
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
        """Return the oldest completion that is not requested yet."""
        return next((each for each in self.completions.values() if not each.sent and not each.response.done()), None)

    def _on_activity(self) -> None:
        if self.stream is not None:
            self.stream.on_activity()

    async def _follow_events(self) -> None:
        with suppress(RolloutError):  # see `_await_end`
            async for _ in self.rollout.log.follow(self.sent_events):
                if self.stream is not None:
                    self.stream.log_grew(self)

    async def _await_end(self) -> None:
        with suppress(RolloutError):  # the rollout was forgotten without an end, and has left its stream
            await self.rollout.log.final_entry()
            if self.stream is not None:
                self.stream.log_grew(self)
        if self.stream is None:
            self._ended(self)
