"""Open calls and the keys they were made with: a call ends when its key is revoked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rollout_server.core.error import Forbidden, Unauthenticated

_T = TypeVar("_T")


class OpenCall:
    """One open call."""

    def __init__(self) -> None:
        self._revoked = False
        self._waiting: asyncio.Timeout | None = None

    async def wait(self, work: Awaitable[_T]) -> _T:
        """Await a part of the call's work. Once the key is revoked, cancel the work and raise Unauthenticated.

        `asyncio.timeout` distinguishes a revocation from other cancellations: it converts only its own cancellation to
        TimeoutError.
        """
        try:
            async with asyncio.timeout(0 if self._revoked else None) as self._waiting:
                return await work
        except TimeoutError:
            if self._revoked:
                raise Unauthenticated("The API key of this call was revoked") from None
            raise
        finally:
            self._waiting = None

    def revoke(self) -> None:
        """End the call, now or when it waits next."""
        if not self._revoked and self._waiting is not None:
            self._waiting.reschedule(0)  # only once: `reschedule` raises after the timeout has expired
        self._revoked = True


class OpenCalls:
    """All open calls, each with a function that repeats the check of its key."""

    def __init__(self) -> None:
        self._checks: dict[OpenCall, Callable[[], object]] = {}
        self.changes = 0
        """How often the keys have changed."""

    @contextmanager
    def entered(self, check: Callable[[], object], changes: int) -> Iterator[OpenCall]:
        """Register a call for the duration of the block. `check` raises Unauthenticated once the call's key is revoked.

        `changes`: what `self.changes` was when the call was checked. Its key may have been revoked before its request arrived.
        """
        if changes != self.changes:
            check()
        call = OpenCall()
        self._checks[call] = check
        try:
            yield call
        finally:
            del self._checks[call]

    def end_revoked(self) -> None:
        """Check all keys again and end the calls whose keys are refused."""
        self.changes += 1
        for call, check in self._checks.items():
            try:
                check()
            except Unauthenticated:
                call.revoke()
            except Forbidden:
                pass  # the key of a rollout that this process does not know any more: such a call ends with its rollout
