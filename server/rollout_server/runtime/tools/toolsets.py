"""Sessions with toolsets: whose they are, when they are opened and closed, and what becomes of one that is lost.

A rollout opens a session with its first call of a tool of the toolset, and closes it with its end. `session="shared"` of an agent's
MCP server means one session for all rollouts instead. Each session has a task of its own, which enters and leaves it: a connection
may hold task groups, which only the task that entered them can leave.

A session that is lost has lost its state. Each further call of the rollout fails then: a new session would silently begin anew.
Where the state is not that of the session (shared sessions, and a ToolService, whose state hangs on the uid), the next call opens
another one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Final

from rollout_server.runtime.errors import ToolError
from rollout_server.runtime.ports import Content
from rollout_server.runtime.tools.listing import checked_listing
from rollout_server.runtime.tools.protocols import ToolFailed, ToolsetLost
from rollout_server.runtime.tools.remote_tool import RemoteTool, ToolsetLimits, remote_tool
from rollout_server.runtime.tools.task import TIMED_OUT
from rollout_server.runtime.tools.toolset import (
    McpServer,
    ToolsetCall,
    ToolsetCaller,
    ToolsetConnector,
    ToolsetSession,
    ToolsetSource,
    is_tool_service,
)

_log = logging.getLogger(__name__)
_CLOSE_SECONDS: Final = 5.0
"""How long a session may take to close before its task is cancelled, and then again before it is abandoned."""


ObserveCall = Callable[[str, str, float], None]
"""Called after each call with the name of the toolset, the result, and the seconds.

Results: "ok"; "error" of the tool; "failed": no valid result; "timeout"; "cancelled": the rollout ended, or its agent cancelled it.
"""
BeforeUse = Callable[[ToolsetSource], Awaitable[None]]
"""Called before a rollout's first call in a session whose state ends with it."""


class Toolsets:
    """The server's toolsets. Lives on its event loop."""

    def __init__(
        self,
        connector: ToolsetConnector,
        limits: ToolsetLimits | None = None,
        observe: ObserveCall = lambda name, result, seconds: None,
    ) -> None:
        self.connector = connector
        self.limits = limits or ToolsetLimits()
        self.observe = observe
        self.sessions = 0
        """Number of sessions, those that are being opened included."""
        self._slots: dict[ToolsetSource, _ToolsetSlots] = {}
        self._shared = RolloutToolsets(self, ToolsetCaller())

    async def list_tools(self, source: ToolsetSource) -> Sequence[RemoteTool]:
        """Return the checked tools of a toolset, listed in the shared session, or in one of its own.

        Raises `ToolFailed` with a text that names the toolset.
        """
        if _is_shared(source):
            return await self._shared.list_tools(source)
        own = RolloutToolsets(self, ToolsetCaller())
        try:
            return await own.list_tools(source)
        finally:
            await own.close()

    def of_rollout(self, caller: ToolsetCaller, before_use: BeforeUse) -> RolloutToolsets:
        """Return the sessions of one rollout. They have to be closed."""
        return RolloutToolsets(self, caller, self._shared, before_use)

    @contextmanager
    def slots_of(self, source: ToolsetSource) -> Iterator[_ToolsetSlots]:
        """Yield the slots of a toolset. Requests name any number of toolsets, so nothing is kept of one that nobody uses."""
        slots = self._slots.setdefault(source, _ToolsetSlots(self.limits))
        slots.users += 1
        try:
            yield slots
        finally:
            slots.users -= 1
            if not slots.users:
                del self._slots[source]

    async def close(self) -> None:
        """Close the shared sessions. Those of rollouts are closed by then."""
        await self._shared.close()


class _ToolsetSlots:
    """What limits the sessions and calls of one toolset: one that never answers keeps only its own rollouts waiting."""

    def __init__(self, limits: ToolsetLimits) -> None:
        self.opening = asyncio.Semaphore(limits.opening)
        self.calls = asyncio.Semaphore(limits.calls)
        self.users = 0


class RolloutToolsets:
    """The sessions of one rollout, or the shared ones.

    Args:
        toolsets: the server's.
        caller: the rollout.
        shared: where shared sessions are; None: these are they.
        before_use: see `BeforeUse`.
    """

    def __init__(
        self,
        toolsets: Toolsets,
        caller: ToolsetCaller,
        shared: RolloutToolsets | None = None,
        before_use: BeforeUse | None = None,
    ) -> None:
        self._toolsets = toolsets
        self._caller = caller
        self._shared = shared
        self._before_use = before_use
        self._used: set[ToolsetSource] = set()
        self._current: dict[ToolsetSource, _SessionTask] = {}
        self._running: set[_SessionTask] = set()  # with those that are lost and still close
        self._is_closed = False

    async def list_tools(self, source: ToolsetSource) -> Sequence[RemoteTool]:
        """Return the checked tools of a toolset for this rollout. Raises `ToolFailed` with a text that names the toolset."""
        limits = self._toolsets.limits
        include = source.include if isinstance(source, McpServer) else None
        try:
            session = await self._session(source).opened()
            async with asyncio.timeout(limits.open_seconds):
                listed = await session.list_tools()
            chosen = await checked_listing(listed, include, limits.listing)
        except TimeoutError:
            raise ToolFailed(f"{source} did not list its tools within {limits.open_seconds:g} s") from None
        except (ToolFailed, ToolError) as error:
            text = str(error)
            raise ToolFailed(text if str(source) in text else f"{source}: {text}") from error
        return tuple(remote_tool(each, source, limits) for each in chosen)

    async def open(self, source: ToolsetSource) -> None:
        """Open the session for a call, if it is not open. Raises `ToolFailed`, with which the call has failed."""
        if self._shared is not None and _is_shared(source):
            await self._shared.open(source)
            return
        began = time.monotonic()
        try:
            await self._session(source).opened()
        except ToolFailed:
            self._toolsets.observe(str(source), "failed", time.monotonic() - began)
            raise
        if self._before_use is not None and source not in self._used and not keeps_state(source):
            self._used.add(source)
            await self._before_use(source)

    async def call(self, source: ToolsetSource, call: ToolsetCall) -> Content:
        """Run one call. Raises what `ToolsetSession.call` raises."""
        if self._shared is not None and _is_shared(source):
            return await self._shared.call(source, call)
        toolsets, began, result = self._toolsets, time.monotonic(), "failed"
        try:
            with toolsets.slots_of(source) as slots:
                async with slots.calls:
                    content = await self._call(source, call)
            result = "ok"
            return content
        except ToolError:
            result = "error"
            raise
        except asyncio.CancelledError as error:
            result = "timeout" if error.args == (TIMED_OUT,) else "cancelled"
            raise
        finally:
            toolsets.observe(str(source), result, time.monotonic() - began)

    async def close(self) -> None:
        """Close all sessions. Takes a few seconds at most."""
        self._is_closed = True
        if self._running:
            await asyncio.gather(*(session.close() for session in [*self._running]))

    async def _call(self, source: ToolsetSource, call: ToolsetCall) -> Content:
        task = self._session(source)
        session = await task.opened()
        try:
            return await session.call(call)
        except ToolsetLost as lost:
            task.lose(str(lost))
            raise

    def _session(self, source: ToolsetSource) -> _SessionTask:
        if self._is_closed:
            raise ToolFailed(f"the session with {source} is closed")
        task = self._current.get(source)
        if task is not None and task.is_over:
            if task.lost and not keeps_state(source):
                raise ToolFailed(
                    f"the session with {source} was lost earlier in this rollout, with its state ({task.lost})"
                )
            task = None
        if task is None:
            task = self._current[source] = _SessionTask(self._toolsets, source, self._caller, self._running.discard)
            self._running.add(task)
        return task


class _SessionTask:
    """One session and its task."""

    def __init__(
        self,
        toolsets: Toolsets,
        source: ToolsetSource,
        caller: ToolsetCaller,
        ended: Callable[[_SessionTask], None],
    ) -> None:
        """Begin to open it. `ended` is called once it is closed."""
        self.lost = ""
        """Why the session was lost; empty if it was not."""
        self._toolsets = toolsets
        self._source = source
        self._opened: asyncio.Future[ToolsetSession] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._task = asyncio.create_task(self._run(caller), name=f"session with {source}")
        self._task.add_done_callback(lambda _: ended(self))

    @property
    def is_over(self) -> bool:
        """Whether no further call can use it."""
        return self._closing.is_set() or self._task.done()

    async def opened(self) -> ToolsetSession:
        """Wait until it is open. Raises `ToolFailed`."""
        return await asyncio.shield(self._opened)  # a call that is cancelled leaves it to the others

    def lose(self, why: str) -> None:
        """Close it: it is of no use any more."""
        self.lost = self.lost or why
        self._closing.set()

    async def close(self) -> None:
        """Close it and wait for that, within limits."""
        self._closing.set()
        if not self._opened.done():
            self._task.cancel()
        _, pending = await asyncio.wait({self._task}, timeout=_CLOSE_SECONDS)
        if pending:
            self._task.cancel()
            _, pending = await asyncio.wait({self._task}, timeout=_CLOSE_SECONDS)
        if pending:
            _log.warning("the session with %s cannot be closed and is abandoned", self._source)

    async def _run(self, caller: ToolsetCaller) -> None:
        toolsets, source = self._toolsets, self._source
        toolsets.sessions += 1
        try:
            with toolsets.slots_of(source) as slots:
                async with AsyncExitStack() as stack:
                    async with slots.opening, asyncio.timeout(toolsets.limits.open_seconds):
                        session = await stack.enter_async_context(toolsets.connector.connect(source, caller))
                    self._opened.set_result(session)
                    await self._closing.wait()
        except (Exception, asyncio.CancelledError) as error:  # the boundary to programs of others
            self._end(error)
        finally:
            toolsets.sessions -= 1

    def _end(self, error: BaseException) -> None:
        if self._opened.done():
            if not isinstance(error, asyncio.CancelledError):
                _log.info("the session with %s ended with an error (%s)", self._source, type(error).__name__)
            self.lose(f"it ended with {type(error).__name__}")
            return
        text = f"{self._source} cannot be reached ({type(error).__name__})"
        if isinstance(error, ToolFailed):
            text = str(error)
        elif isinstance(error, TimeoutError):
            text = f"{self._source} did not answer within {self._toolsets.limits.open_seconds:g} s"
        elif isinstance(error, asyncio.CancelledError):
            text = f"the session with {self._source} was closed while it was opened"
        self._opened.set_exception(ToolFailed(text))
        self._opened.exception()  # mark it as retrieved: perhaps nobody waits for it any more


def _is_shared(source: ToolsetSource) -> bool:
    return isinstance(source, McpServer) and source.session == "shared"


def keeps_state(source: ToolsetSource) -> bool:
    """Return whether a new session has the state of the one before.

    A shared session has none that is a rollout's, and that of a ToolService hangs on the uid.
    """
    return _is_shared(source) or is_tool_service(source)


class NoToolsets:
    """A connector for servers without toolsets: the default."""

    @asynccontextmanager
    async def connect(self, source: ToolsetSource, caller: ToolsetCaller) -> AsyncIterator[ToolsetSession]:
        """Raise `ToolFailed`."""
        raise ToolFailed(f"{source} cannot be opened here; only a server does that")
        yield
