"""Tools of a ToolService: calls over gRPC, their repetition under one call key, and the meaning of errors (tool_service.proto)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import grpc

from rollout_server.core.message import MalformedMessage
from rollout_server.edge.grpc_channels import LARGEST_ANSWER, Channels, call_metadata
from rollout_server.edge.targets.rules import TargetRefused
from rollout_server.edge.tracing.conventions import ATTEMPT_FAILED
from rollout_server.edge.tracing.propagation import add_event
from rollout_server.edge.trainer.http_errors import redact
from rollout_server.edge.wire.status_details import retry_delay
from rollout_server.edge.wire.toolset import (
    ReportedError,
    call_request,
    describe_request,
    parse_listing,
    parse_result,
)
from rollout_server.runtime.errors import ToolError
from rollout_server.runtime.ports import Content
from rollout_server.runtime.tools.protocols import ToolFailed
from rollout_server.runtime.tools.toolset import (
    ListedTool,
    RequestedToolset,
    ToolsetCall,
    ToolsetCaller,
    ToolsetSession,
)

_SERVICE: Final = "/osmosis.rollout.v1.ToolService"
_REPEATED: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
_TOO_LARGE: Final = ("message larger than max", "metadata size exceeds")
"""gRPC's own texts for an answer over a size limit at this end, or a request at the other. Repeating does not help."""


@dataclass(frozen=True, slots=True)
class ToolServiceTimes:
    """Times of calls to tool servers, in seconds.

    Args:
        connect: for one attempt to connect.
        listing: for a list of tools, with all its attempts.
        call: for a call of a tool, with all its attempts. The tool's own time limit is usually shorter, but it may have none.
        unavailable: for how long a call is repeated, from its first refused attempt.
        first, most: the pause before the first repetition, which doubles each time, and the longest pause.
    """

    connect: float = 10.0
    listing: float = 30.0
    call: float = 86_400.0
    unavailable: float = 45.0
    first: float = 0.1
    most: float = 5.0


class ToolServiceConnector:
    """Opens sessions with ToolServices. They share the channels of the process, so a session has nothing to close."""

    def __init__(self, channels: Channels, times: ToolServiceTimes | None = None) -> None:
        self._channels = channels
        self._times = times or ToolServiceTimes()

    @asynccontextmanager
    async def connect(self, source: RequestedToolset, caller: ToolsetCaller) -> AsyncIterator[ToolsetSession]:
        """Yield a session. Nothing is sent yet: `list_tools` finds out whether the tool server can be reached."""
        yield _Session(self._channels, source.target.url, caller, self._times)


@dataclass(frozen=True, slots=True)
class _Rpc:
    """An rpc to send until it is answered: its name, the encoded request, and the time for all attempts in seconds."""

    name: str
    request: bytes
    seconds: float


@dataclass(frozen=True, slots=True)
class _AttemptError:
    """A failed attempt. `kind`: its word for the log. `wait`: seconds until a repetition makes sense; None: never."""

    text: str
    kind: str
    wait: float | None


class _Session:
    def __init__(self, channels: Channels, url: str, caller: ToolsetCaller, times: ToolServiceTimes) -> None:
        self._channels = channels
        self._url = url
        self._caller = caller
        self._times = times

    async def list_tools(self) -> Sequence[ListedTool]:
        """See `ToolsetSession`."""
        rpc = _Rpc("DescribeTools", describe_request(self._caller), self._times.listing)
        try:
            return await parse_listing(await self._send(rpc))
        except MalformedMessage as error:
            raise self._failed(rpc, f"the list cannot be used: {error}") from None

    async def call(self, call: ToolsetCall) -> Content:
        """See `ToolsetSession`. An idempotent tool that broke down is called once more, with another key."""
        result = await self._call(call, call.key)
        if isinstance(result, ReportedError) and result.may_have_run and call.idempotent:
            result = await self._call(call, f"{call.key}/again")
        if isinstance(result, ReportedError):
            bearer, text = self._caller.bearer, result.message or "The tool reported an error without a text"
            raise ToolError(text.replace(bearer, "[redacted]") if bearer else text)
        return result

    async def _call(self, call: ToolsetCall, key: str) -> Content | ReportedError:
        rpc = _Rpc("CallTool", call_request(call, key, self._caller.metadata_json), self._times.call)
        try:
            return await parse_result(await self._send(rpc))
        except MalformedMessage as error:
            raise self._failed(rpc, f"the result cannot be used: {error}") from None

    async def _send(self, rpc: _Rpc) -> bytes:
        """Return the answer, repeating attempts that did not run or whose answer can be had by repeating them.

        Raises `ToolFailed`.
        """
        end = until = time.monotonic() + rpc.seconds
        attempts = 0
        while True:
            try:
                return await self._attempt(rpc, end)
            except TargetRefused as error:
                raise self._failed(rpc, f"was not called: {error}", "a refused target") from None
            except OSError as error:  # no connection was established
                add_event(ATTEMPT_FAILED, {"error.type": type(error).__name__})
                failure = _AttemptError(f"could not be reached: {error}", "no connection", 0.0)
            except grpc.aio.AioRpcError as error:
                add_event(ATTEMPT_FAILED, {"rpc.response.status_code": error.code().name})
                failure = self._failure(error)
            if attempts == 0:
                until = min(end, time.monotonic() + self._times.unavailable)
            attempts += 1
            pause = self._pause(failure, attempts)
            if pause is None or time.monotonic() + pause >= until:
                often = f" ({attempts} attempts)" if attempts > 1 else ""
                raise self._failed(rpc, f"{failure.text}{often}", failure.kind)
            await asyncio.sleep(pause)

    async def _attempt(self, rpc: _Rpc, end: float) -> bytes:
        """Make one attempt. Raises OSError if no connection was established, `TargetRefused` among them."""
        metadata = call_metadata(self._caller.bearer)
        async with self._channels.use(self._url) as channel:
            left = max(0.001, end - time.monotonic())
            await self._channels.connect(channel, min(self._times.connect, left))
            # Raw bytes: with a deserializer, gRPC would parse even a huge answer on the event loop.
            method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"{_SERVICE}/{rpc.name}")
            answer: bytes = await method(rpc.request, metadata=metadata, timeout=max(0.001, end - time.monotonic()))
        return answer

    def _failure(self, error: grpc.aio.AioRpcError) -> _AttemptError:
        code, details = error.code(), error.details() or ""
        secrets = (self._caller.bearer,) if self._caller.bearer else ()
        text = f"answered {code.name}: {redact(details.encode('utf-8', 'replace'), secrets)}"
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and any(each in details for each in _TOO_LARGE):
            return _AttemptError(f"{text}. Answers of up to {LARGEST_ANSWER} bytes are accepted", code.name, None)
        return _AttemptError(text, code.name, (retry_delay(error) or 0.0) if code in _REPEATED else None)

    def _pause(self, failure: _AttemptError, attempts: int) -> float | None:
        """Return the seconds before the next attempt; None if there is none. A wait of 0 s must not become a busy loop."""
        if failure.wait is None:
            return None
        return max(failure.wait, min(self._times.most, self._times.first * 2.0 ** min(attempts - 1, 16)))

    def _failed(self, rpc: _Rpc, text: str, kind: str = "a malformed answer") -> ToolFailed:
        return ToolFailed(f"the tool server {self._url}, {rpc.name}: {text}", kind)
