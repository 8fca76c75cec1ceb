"""The model endpoint of one rollout, as its callers see it, and the slot through which they find it."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from rollout_server.core.capture.call import Completed, ModelCall
from rollout_server.core.capture.rendering import LaterSystem
from rollout_server.core.capture.rules import CaptureOptions
from rollout_server.core.error import AlreadyFinished, Busy, RolloutOver
from rollout_server.core.message import ToolCall
from rollout_server.core.outcome import Failure, RewardResult, Stop
from rollout_server.core.spec import Spec
from rollout_server.runtime.agent_protocol import AgentProtocol
from rollout_server.runtime.aio.event_loop import first_done
from rollout_server.runtime.ports import Tool
from rollout_server.runtime.tools.executor import ToolResult

MOST_CALLS: Final = 64
"""Calls of one rollout that may be open at the same time."""
_MOST_KEYS: Final = 16
"""Keys of one rollout that are accepted after restarts. Each process hands out at most one."""
_DIGEST_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class ModelAccess:
    """How an agent reaches the model endpoint of its rollout.

    Args:
        base_url: the base URL, for Anthropic clients; OpenAI clients need it with "/v1" appended. Only a path, "/r/UID", if the
            server does not know under which URL its gateway is reached.
        key: the key of the rollout, valid until it ends; empty on a server without endpoints.
    """

    base_url: str
    key: str = field(default="", repr=False)

    @property
    def mcp_url(self) -> str:
        """URL of an MCP server with the tools of the rollout. Requests need the key as `Authorization: Bearer KEY`."""
        return f"{self.base_url}/mcp"


def no_model_access(uid: str) -> ModelAccess:
    """Return the access of a rollout on a server without a gateway and keys: the default."""
    return ModelAccess(f"/r/{uid}")


def count_nothing(agent: AgentProtocol, tool: str, failed: bool, seconds: float) -> None:
    """Count no call of a tool."""


async def no_later_system(spec: Spec) -> LaterSystem:
    """Return how a later system message is rendered if no chat template is known: as one of the user."""
    return "user"


@dataclass(frozen=True, slots=True)
class CapturePorts:
    """What the endpoints of a server's rollouts need from the outside.

    Args:
        access: returns the access to the endpoint of a rollout, by its uid.
        later_system: returns the role with which a system message behind other messages is rendered for a rollout: "system" only
            if its chat template is known to do it. Raises `RolloutFailed` if the template cannot be loaded.
        count_tool: called with the agent, the tool, whether the result is an error, and the seconds of each call of a tool that the
            agent makes at the endpoint: the log has no record of it.
    """

    access: Callable[[str], ModelAccess] = no_model_access
    later_system: Callable[[Spec], Awaitable[LaterSystem]] = no_later_system
    count_tool: Callable[[AgentProtocol, str, bool, float], None] = count_nothing


@dataclass(frozen=True, slots=True)
class FinishedWork:
    """What an agent that runs elsewhere says at the end of its work.

    Args:
        reward: the reward; without a number, the agent class computes it.
        failure: why the agent failed; None if it did not. A rollout with a failure has no reward.
    """

    reward: RewardResult = RewardResult()
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class EndpointCall:
    """A call of a tool by the agent itself.

    Args:
        call: the call; its arguments are an object.
        repeat_key: the agent's idempotency key; empty: none.
        digest: equal for equal calls.
        size: characters of the arguments as text.
    """

    call: ToolCall
    repeat_key: str = ""
    digest: bytes = b""
    size: int = 0


class RolloutTools(Protocol):
    """The tools that the server runs for a rollout, also for an agent that owns its loop."""

    @property
    def tools(self) -> Sequence[Tool]:
        """The tools, in their order."""

    @property
    def idempotent(self) -> Sequence[str]:
        """Names of the tools whose calls are harmless to repeat."""

    async def call(self, call: EndpointCall) -> ToolResult:
        """Run a call and return its result. A call with the repeat key of an earlier one gets the result of that.

        A caller that is cancelled cancels its call, unless that has a repeat key.

        Raises:
            NotFound: if there is no such tool.
            CallRefused: if the repeat key belongs to another call.
            RolloutOver: if the rollout has ended, or ends before the result.
            Busy: if too many calls are open.
        """


class AgentEndpoint(Protocol):
    """The endpoint that calls of a rollout's agent reach. `runtime.capture.capture.Capture` implements it.

    Attributes:
        options: what the agent's author decided.
    """

    options: CaptureOptions

    @property
    def tools(self) -> RolloutTools:
        """The tools of the rollout."""

    async def call(self, call: ModelCall, begun: Callable[[str], None]) -> Completed:
        """Return the completion of a call. A caller that is cancelled cancels nothing: the same call gets the completion later.

        `begun` is called with the id of the completion before it is generated; not for one that exists already.

        Raises:
            CallRefused: if the call is invalid or not supported. The rollout goes on.
            RolloutOver: if the rollout has ended, or ends before the completion.
            Busy: if too many calls are open.
        """

    def confirm(self, completion_id: str) -> None:
        """Record that a completion reached the agent to its last byte. Raise `NotFound`, or `RolloutOver`."""

    def finish(self, work: FinishedWork) -> bool:
        """End the agent's work. Return whether it had been ended with the same result.

        A limit may have ended the calls before. Raises `AlreadyFinished` if the work was ended with another result, and
        `RolloutOver` if the rollout failed, or its end was requested.
        """


_DEFAULTS = CaptureOptions()  # checks its values, which every new rollout would do again


class CaptureSlot:
    """Where the calls for a rollout find its endpoint. Calls that arrive before its agent has opened it wait.

    Args:
        requested: done once the end of the rollout is requested.
        reached: done once the rollout has reached an end by itself.

    Attributes:
        options: those of the endpoint, also after its end; the defaults before the agent has opened it.
        key_digests: SHA-256 digests of the keys that were handed out for it, in a row, the newest last. A server that is
            restarted accepts these keys, and can hand out only other ones.
    """

    def __init__(self, requested: asyncio.Future[Any], reached: asyncio.Future[Any]) -> None:
        self.options = _DEFAULTS
        self.key_digests = b""
        self._requested = requested
        self._reached = reached
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._endpoint: AgentEndpoint | None = None
        self._waiting = 0
        self._finished: asyncio.Future[FinishedWork] = asyncio.get_running_loop().create_future()
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._over = False

    def restore(self, key_digests: bytes, work: FinishedWork | None) -> None:
        """Take over what an earlier process has stored. `work`: the agent has ended its work."""
        self.key_digests = key_digests
        if work is not None:
            self._finished.set_result(work)

    def add_key(self, key: str) -> bool:
        """Add the digest of a key that is handed out. Return False if it was handed out before. The oldest of many are dropped."""
        if self.accepts(key):
            return False
        self.key_digests = (self.key_digests + _digest(key))[-_MOST_KEYS * _DIGEST_BYTES :]
        return True

    def accepts(self, key: str) -> bool:
        """Return whether a key was handed out, by this process or an earlier one."""
        found, known = _digest(key), self.key_digests
        parts = (known[at : at + _DIGEST_BYTES] for at in range(0, len(known), _DIGEST_BYTES))
        return any(hmac.compare_digest(found, part) for part in parts)

    async def call(self, call: ModelCall, begun: Callable[[str], None] = lambda completion_id: None) -> Completed:
        """See `AgentEndpoint.call`."""
        return await (await self.opened()).call(call, begun)

    async def confirm(self, completion_id: str) -> None:
        """See `AgentEndpoint.confirm`."""
        (await self.opened()).confirm(completion_id)

    async def tools(self) -> RolloutTools:
        """Wait for the tools of the rollout. Raise `RolloutOver` and `Busy`."""
        return (await self.opened()).tools

    async def finish(self, work: FinishedWork) -> bool:
        """See `AgentEndpoint.finish`. It can be repeated with the same result after the end of the rollout."""
        if not self._opened.done() and not self._finished.done():
            await self.opened()
        if self._finished.done():
            return repeats(self._finished.result(), work)
        if self._endpoint is not None:
            self._endpoint.finish(work)
        elif self._over or self._requested.done() or not self._stopped():
            raise RolloutOver()
        self._finished.set_result(work)
        return False

    async def late_work(self, seconds: float) -> FinishedWork | None:
        """Wait for the end of the work of an agent whose calls a limit has ended; None if it does not come in time.

        From then on it would come too late, and is refused.
        """
        await first_done(self._finished, self._requested, within=seconds)
        self._over = True
        return self._finished.result() if self._finished.done() else None

    def _stopped(self) -> bool:
        return self._reached.done() and isinstance(self._reached.result(), Stop)

    async def opened(self) -> AgentEndpoint:
        """Wait until the rollout's agent has opened its endpoint. Raise `RolloutOver` and `Busy`."""
        if not self._opened.done():
            if self._waiting >= MOST_CALLS:
                raise too_many_calls()
            self._waiting += 1
            try:
                await first_done(self._opened, self._requested, self._reached)
            finally:
                self._waiting -= 1
        if self._endpoint is None:
            raise RolloutOver()
        return self._endpoint

    def open(self, endpoint: AgentEndpoint) -> bool:
        """Set the endpoint. Return False if the rollout had one before, or has ended."""
        if self._opened.done():
            return False
        self._opened.set_result(None)
        self._endpoint, self.options = endpoint, endpoint.options
        if self._finished.done():
            endpoint.finish(self._finished.result())
        return True

    def close(self) -> None:
        """Refuse all further calls."""
        self._opened.cancel()  # wakes the calls that wait for it
        self._endpoint = None
        if not self._closed.done():
            self._closed.set_result(None)

    async def closed(self, seconds: float) -> None:
        """Wait until the endpoint is closed and what its calls were is recorded, or for so many seconds."""
        await first_done(self._closed, self._requested, within=seconds)

    def end(self) -> None:
        """Refuse all further calls and results: the rollout has its outcome."""
        self.close()
        self._over = True


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def repeats(earlier: FinishedWork, work: FinishedWork) -> bool:
    """Return True if work that had been finished is finished again with the same result. Raise `AlreadyFinished` otherwise."""
    if earlier != work:
        raise AlreadyFinished("the rollout was finished with another result")
    return True


def too_many_calls() -> Busy:
    """Return the error of a call beyond `MOST_CALLS`."""
    text = (
        f"the rollout has {MOST_CALLS} open calls, more are not allowed; repeat the call when one of them has returned"
    )
    return Busy(text, retry_after=1.0, reason="TOO_MANY_CALLS")
