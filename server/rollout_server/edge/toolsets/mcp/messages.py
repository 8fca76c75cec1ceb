"""The messages between a client and an MCP server, as the SDK's transports exchange them, checked before the SDK reads them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

from mcp.client._transport import ReadStream, Transport, TransportStreams, WriteStream
from mcp.shared.message import SessionMessage
from mcp_types import CONNECTION_CLOSED, ErrorData, JSONRPCError, JSONRPCNotification, JSONRPCRequest, JSONRPCResponse

from rollout_server.core.message import MAX_VALUES

Incoming: TypeAlias = SessionMessage | Exception
_UNREQUESTED: Final = 10_000
"""Messages that a server may send for each request of the client, besides the response. Logs and progress are among them."""
_REQUEST_COST: Final = 100
"""A request of the server counts as so many messages: each is answered by a refusal."""
TOO_MANY_VALUES: Final = f"it sent a message with more than {MAX_VALUES:,} JSON values"
_BLOCKS: Final = 1000
"""Blocks of content that a result may have."""


class StreamContext:
    """The context manager that the SDK wants of a stream. Leaving it does nothing: the transport closes its streams itself.

    The SDK leaves a stream as soon as no more messages come. If that closed it, an HTTP request that still runs would fail with an
    exception, which cancels the task that opened the session.
    """

    async def aclose(self) -> None:
        """Do nothing."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class CheckedMessages(StreamContext):
    """The messages of a server. Notifications are dropped, floods end the session, and schemas of results are left out.

    The SDK would start a task for each notification, and would check each result against the schema that the server chose.
    """

    def __init__(self, source: ReadStream[Incoming], most_tools: int) -> None:
        self.ended = False
        self.flooded = False
        self._source = source
        self._most_tools = most_tools
        self._left = _UNREQUESTED

    def expect_response(self) -> None:
        """Count anew: the client has sent a request."""
        self._left = _UNREQUESTED

    async def receive(self) -> Incoming:
        """Return the next message. Raise StopAsyncIteration at the end."""
        return await self.__anext__()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Incoming:
        while self._left > 0:
            try:
                item = await self._source.__anext__()
            except StopAsyncIteration:
                self.ended = True
                raise
            message = item.message if isinstance(item, SessionMessage) else None
            self._left -= _REQUEST_COST if isinstance(message, JSONRPCRequest) else 1
            if message is not None and not isinstance(message, JSONRPCNotification):
                return SessionMessage(_checked(message, self._most_tools))
        self.ended = self.flooded = True
        raise StopAsyncIteration


class CountedRequests(StreamContext):
    """The messages to a server."""

    def __init__(self, target: WriteStream[SessionMessage], incoming: CheckedMessages) -> None:
        self._target = target
        self._incoming = incoming

    async def send(self, item: SessionMessage, /) -> None:
        """Send a message."""
        if isinstance(item.message, JSONRPCRequest):
            self._incoming.expect_response()
        await self._target.send(item)


class CheckedTransport:
    """A transport of the SDK whose messages are checked."""

    def __init__(self, transport: Transport, most_tools: int, reason: Callable[[], str]) -> None:
        self._transport = transport
        self._most_tools = most_tools
        self._reason = reason
        self._incoming: CheckedMessages | None = None

    @property
    def ended(self) -> str:
        """Why no more messages come, for people; empty while they may come."""
        if self._incoming is not None and self._incoming.flooded:
            return f"it sent more than {_UNREQUESTED:,} messages that nobody asked for"
        return self._reason() or ("the connection ended" if self._incoming is not None and self._incoming.ended else "")

    @asynccontextmanager
    async def open(self) -> AsyncIterator[TransportStreams]:
        """Open the transport: its messages, and the stream for messages to the server."""
        async with self._transport as (source, target):
            self._incoming = CheckedMessages(source, self._most_tools)
            yield self._incoming, CountedRequests(target, self._incoming)


def _checked(
    message: JSONRPCRequest | JSONRPCResponse | JSONRPCError, most_tools: int
) -> JSONRPCRequest | JSONRPCResponse | JSONRPCError:
    """Return a message without the output schemas of tools, or an error instead of a response that has too many parts."""
    if not isinstance(message, JSONRPCResponse):
        return message
    refusal = _refusal(message.result, most_tools)
    if refusal:  # the code is that of the client's own errors
        return JSONRPCError(jsonrpc="2.0", id=message.id, error=ErrorData(code=CONNECTION_CLOSED, message=refusal))
    tools: Any = message.result.get("tools")
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, dict):
            tool.pop("outputSchema", None)
    return message


def _refusal(result: dict[str, Any], most_tools: int) -> str:
    """Return why a result is not read further; empty if it is. The SDK needs some microseconds for each tool and each block."""
    tools, content = result.get("tools"), result.get("content")
    if isinstance(tools, list) and len(tools) > most_tools:
        return f"it lists {len(tools):,} tools at once; at most {most_tools:,} are accepted"
    if isinstance(content, list) and len(content) > _BLOCKS:
        return f"its result has {len(content):,} blocks of content; at most {_BLOCKS:,} are accepted"
    return TOO_MANY_VALUES if _has_more_values(result) else ""


def _has_more_values(value: Any) -> bool:
    """Return whether there are more than `MAX_VALUES` in a parsed JSON value. Looks at no more than so many."""
    left, count = [value], 0
    while left:
        each = left.pop()
        inner = each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        count += len(inner)
        if count > MAX_VALUES:
            return True
        left += inner
    return False
