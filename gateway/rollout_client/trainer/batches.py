"""Turns that are generated in batches: `generate_batch`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final, TypeAlias

from rollout_client.trainer.generation import Generated, TryAgainLater, Turn, awaited
from rollout_client.trainer.policy import PAUSE_SECONDS, AnnouncedPolicy

_LOG: Final = logging.getLogger("rollout_client")

GenerateBatch: TypeAlias = Callable[[Sequence[Turn]], Awaitable[Sequence[Generated | Exception]]]
"""Coroutine function `generate_batch(turns)`. It returns one result per turn, in the order of the turns: a `Generated`, or an
exception, which concerns only that turn: `TryAgainLater` postpones it, any other one fails its rollout."""


class BatchFailed(Exception):
    """`generate_batch` raised an exception or returned something else. The trainer's log has the reason."""


@dataclass(frozen=True, slots=True, eq=False)
class _WaitingTurn:
    turn: Turn
    result: asyncio.Future[Generated | Exception]
    since: float = field(default_factory=time.monotonic)

    def begun(self) -> Turn:
        """Return the turn with the time that its rollout has now."""
        left = self.turn.seconds_left
        if left is None:
            return self.turn
        return replace(self.turn, seconds_left=max(0.0, left - (time.monotonic() - self.since)))


class Batches:
    """Collects turns and generates them in batches, one batch at a time.

    The next batch starts when all turns wait that can come (`expect`), when `most` turns wait, or when no turn has been added for
    `seconds`. Turns that are added during a batch wait for the next one.

    Args:
        generate_batch: the user's function.
        most: maximum number of turns in a batch.
        seconds: maximum time without a new turn until a batch starts.
        announced: the policy of the batches.
    """

    def __init__(self, generate_batch: GenerateBatch, most: int, seconds: float, announced: AnnouncedPolicy) -> None:
        self._announced = announced
        self._generate_batch = generate_batch
        self._most = most
        self._seconds = seconds
        self._waiting: dict[_WaitingTurn, None] = {}
        self._expected: int | None = None
        self._late = False
        self._timer: asyncio.TimerHandle | None = None
        self._running: asyncio.Task[None] | None = None

    async def generate(self, turn: Turn) -> Generated:
        """Generate a turn in the next batch. Raises the exception that `generate_batch` returned for it, and `BatchFailed`."""
        waiting = _WaitingTurn(turn, asyncio.get_running_loop().create_future())
        self._waiting[waiting] = None
        self._restart_timer()
        self._start_next()
        try:
            result = await waiting.result
        finally:
            self._waiting.pop(waiting, None)
        if isinstance(result, Exception):
            raise result
        return result

    def expect(self, turns: int | None) -> None:
        """Set the number of turns that are requested, if no further one comes before one of them is completed. None: some may come.

        Not all of them wait at this moment: `render` and `decode` of some may be running.
        """
        self._expected = turns
        self._start_next()

    def postpone(self) -> None:
        """Postpone the turns that wait, because sampling is paused. The server requests them again when it goes on."""
        for each in self._waiting:
            if not each.result.done():
                each.result.set_result(TryAgainLater(PAUSE_SECONDS))

    async def close(self) -> None:
        """Cancel the running batch."""
        if self._timer is not None:
            self._timer.cancel()
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    def _restart_timer(self) -> None:
        self._late = False
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._on_late)

    def _on_late(self) -> None:
        self._late = True
        self._start_next()

    def _start_next(self) -> None:
        """Start a batch if there is a reason to, and none is running."""
        complete = self._expected is not None and len(self._waiting) >= self._expected
        if self._running is not None:
            return
        if not (complete or self._late or len(self._waiting) >= self._most):
            return
        # A turn that was cancelled or postponed in this pass of the event loop is still among the waiting ones.
        batch = [*islice((each for each in self._waiting if not each.result.done()), self._most)]
        if batch:
            for each in batch:
                del self._waiting[each]
            self._running = asyncio.create_task(self._run(batch))

    async def _run(self, batch: Sequence[_WaitingTurn]) -> None:
        try:
            results = await self._results([each.begun() for each in batch])
            for each, result in zip(batch, results, strict=True):
                if not each.result.done():
                    each.result.set_result(result)
                    self._expected = None  # the server now requests further turns
            self._restart_timer()
        finally:
            for each in batch:
                each.result.cancel()  # only if it has no result, because the batch was cancelled
            self._running = None
            self._start_next()

    async def _results(self, turns: list[Turn]) -> Sequence[Generated | Exception]:
        policy = self._announced.policy
        try:
            results = await awaited(self._generate_batch(policy.stamp(turns)), "generate_batch")
            return _checked(policy.label(results), len(turns))
        except TryAgainLater as error:
            return [error] * len(turns)
        except Exception:
            _LOG.exception("generate_batch failed; the rollouts of its %d turns fail", len(turns))
            return [BatchFailed()] * len(turns)


def _checked(results: object, count: int) -> Sequence[Generated | Exception]:
    """Return the results of `count` turns. A result of another type becomes a TypeError. Raises TypeError and ValueError."""
    if not isinstance(results, Sequence) or isinstance(results, str | bytes):
        raise TypeError(f"generate_batch must return a list with one result per turn, not {type(results).__name__}")
    if len(results) != count:
        raise ValueError(
            f"generate_batch returned {len(results)} results for {count} turns; return one per turn, in the same order"
        )
    wrong = "generate_batch must return a Generated or an exception for each turn, not {}"
    return [
        each if isinstance(each, Generated | Exception) else TypeError(wrong.format(type(each).__name__))
        for each in results
    ]
