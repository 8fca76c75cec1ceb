"""Runs each call key at most once, and returns the same result to all who send it."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from rollout_server.core.error import InvalidRequest, Violation
from rollout_server.core.message import ToolCall
from rollout_server.runtime.ports import Content
from rollout_server.tool_server.limits import ToolServerLimits

_EXTRA_BYTES = 1000
"""Approximate memory of a finished call besides its result."""


@dataclass(frozen=True, slots=True)
class ServedResult:
    """The result of a call.

    Args:
        content: the result; an error text if `failed`.
        failed: whether the call failed.
        may_have_run: the call was cut off and may have had side effects.
    """

    content: Content
    failed: bool = False
    may_have_run: bool = False


@dataclass(slots=True, eq=False)
class _KeyedCall:
    digest: bytes
    task: asyncio.Task[ServedResult]
    callers: int = 0
    timer: asyncio.TimerHandle | None = None
    until: float = 0.0
    size: int = 0


class KeyedCalls:
    """Running calls, and the results of finished ones, by call key."""

    def __init__(self, limits: ToolServerLimits) -> None:
        self._limits = limits
        self._running: dict[str, _KeyedCall] = {}
        # In the order in which they finished.
        self._finished: OrderedDict[str, _KeyedCall] = OrderedDict()
        self._size = 0

    async def run(self, key: str, digest: bytes, start: Callable[[], asyncio.Task[ServedResult]]) -> ServedResult:
        """Return the result of the key's call, which `start` starts if the key is new.

        A cancelled caller leaves the call running: its connection may have broken, and it comes back with the same key.

        Raises `InvalidRequest` if the key belongs to another call, which `digest` tells, and what `start` raises.
        """
        self._forget(asyncio.get_running_loop().time())
        call = self._running.get(key) or self._finished.get(key)
        if call is None:
            call = self._running[key] = _KeyedCall(digest, start())
            call.task.add_done_callback(lambda _: self._finish(key))
        elif call.digest != digest:
            text = "was used for a call of another tool, of another rollout or with other arguments; use a new key for each call"
            raise InvalidRequest(Violation("call_key", text))
        return await self._wait(call)

    async def _wait(self, call: _KeyedCall) -> ServedResult:
        call.callers += 1
        if call.timer is not None:
            call.timer.cancel()
            call.timer = None
        try:
            await asyncio.wait({call.task})
        finally:
            call.callers -= 1
            if not call.callers and not call.task.done():
                call.timer = asyncio.get_running_loop().call_later(self._limits.orphan_seconds, call.task.cancel)
        return result_of(call.task)

    def _finish(self, key: str) -> None:
        call = self._running.pop(key)
        if call.timer is not None:
            call.timer.cancel()
        now = asyncio.get_running_loop().time()
        failed = call.task.cancelled() or call.task.exception() is not None
        call.size = _EXTRA_BYTES + (0 if failed else _size(call.task.result().content))
        call.until = now + self._limits.key_seconds
        self._finished[key] = call
        self._size += call.size
        self._forget(now)

    def _forget(self, now: float) -> None:
        while self._finished:
            key, oldest = next(iter(self._finished.items()))
            full = len(self._finished) > self._limits.keys or self._size > self._limits.key_bytes
            if not full and oldest.until > now:
                return
            del self._finished[key]
            self._size -= oldest.size


def result_of(task: asyncio.Task[ServedResult]) -> ServedResult:
    """Return the result of a call's task that has ended. Raise what it raised, if it was not cancelled."""
    if task.cancelled():
        return ServedResult("The tool server cancelled the call", failed=True, may_have_run=True)
    return task.result()


def digest_of(uid: str, call: ToolCall) -> bytes:
    """Return a hash that differs for different calls. The order of keys in the arguments does not matter."""
    arguments: object = call.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):  # the tool reports it
            arguments = [call.arguments]
    try:
        text = json.dumps([uid, call.name, arguments], sort_keys=True)
    except (ValueError, RecursionError):
        text = json.dumps([uid, call.name, str(call.arguments)])
    return hashlib.sha256(text.encode()).digest()


def _size(content: Content) -> int:
    """Return the approximate memory of a result in bytes."""
    return len(content) if isinstance(content, str) else sum(len(str(part)) for part in content)
