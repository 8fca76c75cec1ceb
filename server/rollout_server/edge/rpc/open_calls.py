"""The calls under way and the keys that they were made with: a call ends when its key is revoked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rollout_server.core.error import Unauthenticated

_T = TypeVar("_T")


class OpenCall:
    """One call under way."""

    def __init__(self) -> None:
        self._revoked = False
        self._waiting: asyncio.Timeout | None = None

    async def wait(self, work: Awaitable[_T]) -> _T:
        """Awaits some of the call's work. Raises Unauthenticated, and cancels the work, once the key is revoked."""
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
        """Ends the call, now or when it next waits. A call that is ending already is left to it."""
        if not self._revoked and self._waiting is not None:
            self._waiting.reschedule(0)  # raises once it has expired
        self._revoked = True


class OpenCalls:
    """All calls under way, each with what repeats the check of its key."""

    def __init__(self) -> None:
        self._checks: dict[OpenCall, Callable[[], object]] = {}

    @contextmanager
    def entered(self, check: Callable[[], object]) -> Iterator[OpenCall]:
        """A call that is under way for as long as the block lasts; `check` raises Unauthenticated once its key is revoked."""
        call = OpenCall()
        self._checks[call] = check
        try:
            yield call
        finally:
            del self._checks[call]

    def end_revoked(self) -> None:
        """Checks all keys again, and ends the calls whose keys are refused."""
        for call, check in self._checks.items():
            try:
                check()
            except Unauthenticated:
                call.revoke()
