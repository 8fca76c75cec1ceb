"""Requests to the trainer of a stream that wait for a response: completions, and reads of its ledger."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from rollout_server.core.outcome import Category, Failure, FailureClass
from rollout_server.edge.trainer.grpc_client import Rejection, TrainerTokens, TurnCall
from rollout_server.edge.wire.completion import Request, Response
from rollout_server.runtime.errors import RolloutFailed


@dataclass(slots=True, eq=False)
class PendingCompletion:
    """One completion until its response. `sent` is its item's sequence number, 0 before it is sent; `timer` limits the wait."""

    key: str
    request: Request | None
    call: TurnCall
    response: asyncio.Future[Response | Rejection]
    sent: int = 0
    timer: asyncio.TimerHandle | None = None

    def send(self, sequence: int, seconds: float) -> None:
        """Mark it as sent with this sequence number, and let it time out after `seconds`."""
        self.sent = sequence
        self.timer = asyncio.get_running_loop().call_later(seconds, self._time_out, seconds)

    def put_back(self) -> bool:
        """Mark it as not sent, to request it on another stream. Return whether it had been sent."""
        was, self.sent = self.sent, 0
        self.stop()
        return bool(was)

    def stop(self) -> None:
        """Cancel the timer."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def fail(self, category: Category, text: str) -> None:
        """Fail the completion, and with it the rollout."""
        if not self.response.done():
            turn = self.call.turn
            failure = Failure(category, f"turn {turn}: {text}", turn, source=FailureClass.TRAINER)
            self.response.set_exception(RolloutFailed(failure))

    def _time_out(self, seconds: float) -> None:
        text = (
            f"timeout: the trainer did not answer on its stream for {seconds:g} s (ROLLOUT_TRAINER_TIMEOUT_SECONDS). The turn may "
            "have been generated, so it is not asked for again"
        )
        self.fail(Category.TIMEOUT, text)


@dataclass(slots=True, eq=False)
class LedgerRead:
    """A read of one segment as the trainer stores it. `held` resolves to None if the trainer does not send it."""

    uid: str
    segment_id: str
    held: asyncio.Future[Callable[[], TrainerTokens | None] | None]


class LedgerReads:
    """Reads of the trainer's ledger, at most one per segment. Their timeout is short, so none is repeated after a reconnection."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], LedgerRead] = {}
        self._to_send: deque[LedgerRead] = deque()

    def add(self, ledger_read: LedgerRead) -> None:
        """Queue a read."""
        self._open[ledger_read.uid, ledger_read.segment_id] = ledger_read
        self._to_send.append(ledger_read)

    def drop(self, ledger_read: LedgerRead) -> None:
        """Remove a read that is not needed any more."""
        if self._open.get((ledger_read.uid, ledger_read.segment_id)) is ledger_read:
            del self._open[ledger_read.uid, ledger_read.segment_id]

    def next(self) -> LedgerRead | None:
        """Return the next read to send."""
        while self._to_send:
            ledger_read = self._to_send.popleft()
            if not ledger_read.held.done():
                return ledger_read
        return None

    def resolve(self, uid: str, segment_id: str, held: Callable[[], TrainerTokens | None]) -> None:
        """Pass on the trainer's response, also that it does not have the segment."""
        ledger_read = self._open.pop((uid, segment_id), None)
        if ledger_read is not None and not ledger_read.held.done():
            ledger_read.held.set_result(held)

    def fail(self) -> None:
        """Resolve all reads to None: the connection broke."""
        for ledger_read in self._open.values():
            if not ledger_read.held.done():
                ledger_read.held.set_result(None)
        self._open.clear()
        self._to_send.clear()
