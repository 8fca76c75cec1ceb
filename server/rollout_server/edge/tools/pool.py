"""The tool processes of a server: started on demand, kept for a while, and limited in number."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeAlias

from rollout_server.core.message import JSON
from rollout_server.edge.tools.process import ToolProcess
from rollout_server.runtime.ports import Content
from rollout_server.runtime.tools.policy import ToolPolicy
from rollout_server.runtime.tools.protocols import ToolDefinition, ToolFailed
from rollout_server.runtime.tools.slots import Slots

_Key: TypeAlias = tuple[str, str, int | None, float | None, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Limits of the pool.

    Args:
        processes: maximum number of processes; 0: `default_processes`.
        idle_seconds: a process without calls for this time is ended.
        start_seconds: time limit for importing a tool.
    """

    processes: int = 0
    idle_seconds: float = 300.0
    start_seconds: float = 60.0


def default_processes() -> int:
    """Return the number of CPUs, at least 2."""
    return max(2, os.cpu_count() or 2)


class ProcessPool:
    """Pool of tool processes. Lives on one event loop.

    A process runs calls of the tools of one module. Idle processes are ended to make room for other modules.
    """

    def __init__(self, limits: PoolLimits | None = None) -> None:
        self._limits = limits or PoolLimits()
        self._most = self._limits.processes or default_processes()
        self._slots = Slots(self._most)
        self._idle: dict[ToolProcess, tuple[_Key, asyncio.TimerHandle]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._running: set[ToolProcess] = set()
        self._starting = 0
        self._closed = False

    @property
    def alive(self) -> int:
        """Number of existing processes."""
        return len(self._idle) + len(self._running) + len(self._ending)

    @asynccontextmanager
    async def open(self, definition: ToolDefinition, policy: ToolPolicy) -> AsyncIterator[PoolWorker]:
        """Wait for a slot and a process that has imported the tool. Raise `ToolFailed`."""
        await self._slots.acquire()
        try:
            worker = PoolWorker(self, definition, policy)
            await worker.prepare()
            try:
                yield worker
            finally:
                worker.leave()
        finally:
            self._slots.release()

    async def close(self) -> None:
        """Kill all processes and wait until they have ended."""
        self._closed = True
        # A process that `take` is starting is not in these sets yet; `take` ends it itself, because `_closed` is set.
        while processes := [*self._idle, *self._running]:
            for process in processes:
                self.end(process)
        while self._ending:
            await asyncio.wait(self._ending)

    async def take(self, definition: ToolDefinition, policy: ToolPolicy) -> ToolProcess:
        """Return a process for the tool, an idle one if possible. Raise `ToolFailed`."""
        key = _key(definition, policy)
        for process, (of, timer) in list(self._idle.items()):
            if of == key and policy.process != "fresh" and process.alive:
                timer.cancel()
                del self._idle[process]
                self._running.add(process)
                return process
        if self._closed:
            raise ToolFailed("The server is stopping", "Closed")
        if len(self._idle) + len(self._running) + self._starting >= self._most and self._idle:
            self.end(next(iter(self._idle)))
        self._starting += 1
        try:
            process = await ToolProcess.start(policy.environment)
        finally:
            self._starting -= 1
        self._running.add(process)
        if self._closed:
            self.end(process)
            raise ToolFailed("The server is stopping", "Closed")
        try:
            await process.load(definition, policy, self._limits.start_seconds)
        except BaseException:
            self.end(process)
            raise
        return process

    def give(self, process: ToolProcess, definition: ToolDefinition, policy: ToolPolicy) -> None:
        """Take a process back. Keep it if another call may use it."""
        if self._closed or policy.process == "fresh" or not process.alive:
            self.end(process)
            return
        self._running.discard(process)
        timer = asyncio.get_running_loop().call_later(self._limits.idle_seconds, self.end, process)
        self._idle[process] = (_key(definition, policy), timer)

    def end(self, process: ToolProcess) -> None:
        """Kill a process, once, and wait for its end in the background."""
        if process not in self._running and process not in self._idle:
            return
        self._running.discard(process)
        idle = self._idle.pop(process, None)
        if idle is not None:
            idle[1].cancel()
        process.kill()
        task = asyncio.create_task(process.ended(), name="end of a tool process")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


class PoolWorker:
    """One slot of the pool and its process."""

    def __init__(self, pool: ProcessPool, definition: ToolDefinition, policy: ToolPolicy) -> None:
        self._pool = pool
        self._definition = definition
        self._policy = policy
        self._process: ToolProcess | None = None
        self._busy = False

    async def prepare(self) -> ToolProcess:
        """Start a process if there is none. Raise `ToolFailed`."""
        if self._process is not None and not self._process.alive:
            self._pool.end(self._process)
            self._process = None
        if self._process is None:
            self._process = await self._pool.take(self._definition, self._policy)
        return self._process

    async def call(self, arguments: Mapping[str, JSON], context_json: str) -> Content:
        """Run one call; after a crash, in a new process. Cancellation kills the process."""
        process = await self.prepare()
        self._busy = True
        try:
            return await process.call(self._definition.name, arguments, context_json)
        finally:
            self._busy = False

    def leave(self) -> None:
        """Return the process to the pool. A process that is still running a call is killed."""
        process, self._process = self._process, None
        if process is None:
            return
        if self._busy and process.alive:
            self._pool.end(process)
        else:
            self._pool.give(process, self._definition, self._policy)


def _key(definition: ToolDefinition, policy: ToolPolicy) -> _Key:
    return definition.module, definition.file, policy.memory_bytes, policy.cpu_seconds, policy.environment
