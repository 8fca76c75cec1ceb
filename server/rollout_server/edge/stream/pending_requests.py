"""What a stream requests of its trainer and waits for: completions and segments of its ledger."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from rollout_server.core.outcome import Category, Failure
from rollout_server.edge.trainer.grpc_client import Rejection, TrainerTokens, TurnCall
from rollout_server.edge.wire.completion import Request, Response
from rollout_server.runtime.errors import RolloutFailed


@dataclass(slots=True, eq=False)
class PendingCompletion:
    """One completion, until it is over. `sent` is its number on the stream, 0 before; `timer` ends it without a response."""

    key: str
    request: Request | None
    call: TurnCall
    response: asyncio.Future[Response | Rejection]
    sent: int = 0
    timer: asyncio.TimerHandle | None = None

    def send(self, sequence: int, seconds: float) -> None:
        """Marks it as sent under this sequence number, and times it out `seconds` from now."""
        self.sent = sequence
        self.timer = asyncio.get_running_loop().call_later(seconds, self._time_out, seconds)

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
        if not self.response.done():
            self.response.set_exception(
                RolloutFailed(Failure(category, f"turn {self.call.turn}: {text}", self.call.turn))
            )

    def _time_out(self, seconds: float) -> None:
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
    held: asyncio.Future[Callable[[], TrainerTokens | None] | None]


class LedgerReads:
    """Segments that the trainer is to show, at most one read of each. After a cut none is sent again: nobody waits that long."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], LedgerRead] = {}
        self._to_send: deque[LedgerRead] = deque()

    def add(self, ledger_read: LedgerRead) -> None:
        """Somebody waits for it."""
        self._open[ledger_read.uid, ledger_read.segment_id] = ledger_read
        self._to_send.append(ledger_read)

    def drop(self, ledger_read: LedgerRead) -> None:
        """Nobody waits for it any more."""
        if self._open.get((ledger_read.uid, ledger_read.segment_id)) is ledger_read:
            del self._open[ledger_read.uid, ledger_read.segment_id]

    def next(self) -> LedgerRead | None:
        """The next one to send."""
        while self._to_send:
            ledger_read = self._to_send.popleft()
            if not ledger_read.held.done():
                return ledger_read
        return None

    def resolve(self, uid: str, segment_id: str, held: Callable[[], TrainerTokens | None]) -> None:
        """The trainer shows one, or says that it does not."""
        ledger_read = self._open.pop((uid, segment_id), None)
        if ledger_read is not None and not ledger_read.held.done():
            ledger_read.held.set_result(held)

    def fail(self) -> None:
        """The connection broke: none is shown."""
        for ledger_read in self._open.values():
            if not ledger_read.held.done():
                ledger_read.held.set_result(None)
        self._open.clear()
        self._to_send.clear()
