"""Runs the calls of all clients of a tool server, within its limits."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from rollout_server.core.error import Busy, InvalidRequest, Unavailable, Violation
from rollout_server.core.message import JSON, MalformedMessage, ToolCall, parse_object
from rollout_server.runtime.errors import RolloutEnded, RolloutFailed, ToolError
from rollout_server.runtime.ports import Tool
from rollout_server.runtime.tools.executor import ToolExecutor
from rollout_server.runtime.tools.resources import ToolResources
from rollout_server.tool_server.caller_state import CallerState, CallerStates
from rollout_server.tool_server.context import ServedContext
from rollout_server.tool_server.keyed_calls import KeyedCalls, ServedResult, digest_of, result_of
from rollout_server.tool_server.limits import ToolServerLimits

ID_LENGTH = 512
"""Maximum length of a uid and of a call key."""
_RETRY_SECONDS = 1.0
_ERROR = "Error: "


@dataclass(frozen=True, slots=True)
class ServedCall:
    """One call as a client sends it.

    Args:
        call: the tool and its arguments.
        uid: the rollout that calls; empty for a person.
        session: the MCP session of a caller without uid; empty: none.
        metadata_json: the rollout's metadata, one JSON object; may be empty.
        key: call key; empty: the call is never repeated.
    """

    call: ToolCall
    uid: str = ""
    session: str = ""
    metadata_json: str = ""
    key: str = ""

    @property
    def owner(self) -> Hashable:
        """Whose state the call uses: its rollout's, its session's, or that of no other call (None)."""
        if self.uid:
            return ("rollout", self.uid)
        return ("session", self.session) if self.session else None

    def metadata(self) -> Mapping[str, JSON]:
        """Check the fields and return the metadata. Raise `InvalidRequest`."""
        for name, text in (("uid", self.uid), ("call_key", self.key)):
            if len(text) > ID_LENGTH:
                raise InvalidRequest(Violation(name, f"has {len(text)} characters, at most {ID_LENGTH} are allowed"))
        if not self.call.name:
            raise InvalidRequest(Violation("call.name", "must be the name of a tool"))
        return metadata_of(self.metadata_json)


def metadata_of(text: str) -> Mapping[str, JSON]:
    """Parse a rollout's metadata. Raise `InvalidRequest`."""
    try:
        return parse_object(text) if text else {}
    except MalformedMessage as error:
        raise InvalidRequest(Violation("metadata_json", f"must be one JSON object: {error}")) from None


class ServedTools:
    """The tools of a tool server, and their running calls. Lives on one event loop."""

    def __init__(self, tools: Sequence[Tool], resources: ToolResources, limits: ToolServerLimits) -> None:
        self.tools = tuple(tools)
        self._limits = limits
        self._states = CallerStates(limits, lambda: ToolExecutor(self.tools, resources))
        self._keyed = KeyedCalls(limits)
        self._tasks: set[asyncio.Task[ServedResult]] = set()
        self._stopping = False

    @property
    def states(self) -> int:
        """Number of rollouts and sessions whose state is kept."""
        return len(self._states)

    async def call(self, served: ServedCall) -> ServedResult:
        """Run one call. A call without a key is cancelled with its caller.

        Raises `InvalidRequest`, `Busy` if a limit is met, and `Unavailable` while the server stops.
        """
        metadata = served.metadata()
        try:
            if served.key:
                digest = digest_of(served.uid, served.call)
                return await self._keyed.run(served.key, digest, lambda: self._start(served, metadata))
            task = self._start(served, metadata)
        except ToolError as error:
            return ServedResult(str(error), failed=True)
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
        return result_of(task)

    async def drain(self) -> None:
        """Refuse new calls, wait for the running ones, and cancel those that take too long."""
        self._stopping = True
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=self._limits.drain_seconds)
        self.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    def cancel(self) -> None:
        """Cancel all running calls."""
        for task in self._tasks:
            task.cancel()

    def _start(self, served: ServedCall, metadata: Mapping[str, JSON]) -> asyncio.Task[ServedResult]:
        if self._stopping:
            raise Unavailable("the tool server is stopping", retry_after=_RETRY_SECONDS, reason="STOPPING")
        if len(self._tasks) >= self._limits.calls:
            text = f"{self._limits.calls:,} calls are running, and no more are allowed"
            raise Busy(text, retry_after=_RETRY_SECONDS, reason="TOO_MANY_CALLS")
        state = self._states.enter(served.owner)
        context = ServedContext(served.uid, metadata, state.state)
        task = asyncio.create_task(_perform(served.call, state, context), name=f"served call of {served.call.name:.64}")
        self._tasks.add(task)

        def ended(task: asyncio.Task[ServedResult]) -> None:
            self._tasks.discard(task)
            context.cancelled = True  # for a thread that outlives its call
            self._states.leave(served.owner, state)

        task.add_done_callback(ended)
        return task


async def _perform(call: ToolCall, state: CallerState, context: ServedContext) -> ServedResult:
    try:
        result = await state.executor.run(call, context)
    except (RolloutFailed, RolloutEnded) as error:  # the tool cannot be run at all
        return ServedResult(str(error), failed=True)
    if not result.failed:
        return ServedResult(result.content)
    # The caller puts the same word in front of the text.
    return ServedResult(result.text.removeprefix(_ERROR), failed=True)
