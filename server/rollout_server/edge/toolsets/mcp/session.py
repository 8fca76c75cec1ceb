"""A session with an MCP server, through the SDK's client. Imported late: the SDK takes more than a second."""

from __future__ import annotations

import json
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Final

from mcp import Client
from mcp.client._transport import Transport
from mcp.client.session import ClientSession
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp_types import (
    CONNECTION_CLOSED,
    HEADER_MISMATCH,
    PARSE_ERROR,
    CallToolRequest,
    CallToolRequestParams,
    CallToolResult,
    Implementation,
    InputRequiredResult,
    PaginatedRequestParams,
    Tool,
)
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
from pydantic import TypeAdapter, ValidationError

from rollout_server.edge.programs.supervised import ProcessStart
from rollout_server.edge.targets.resolver import CheckedLookup
from rollout_server.edge.toolsets.mcp.content import content_of_result
from rollout_server.edge.toolsets.mcp.http import HttpLimits, McpHttpTransport, http_client
from rollout_server.edge.toolsets.mcp.limits import McpLimits
from rollout_server.edge.toolsets.mcp.messages import CheckedTransport
from rollout_server.edge.toolsets.mcp.stdio import StdioTransport
from rollout_server.edge.tracing.propagation import trace_headers
from rollout_server.runtime.errors import ToolError
from rollout_server.runtime.ports import Content
from rollout_server.runtime.tools.protocols import ToolFailed, ToolsetLost
from rollout_server.runtime.tools.toolset import CALL_META_KEY, UID_META_KEY, ListedTool, ToolsetCall

_RESULT: Final[TypeAdapter[CallToolResult | InputRequiredResult]] = TypeAdapter(CallToolResult | InputRequiredResult)
_LONGEST_TEXT: Final = 500
"""Characters of a server's own error text that are kept."""

for _name in ("mcp.client", "mcp.shared", "client"):  # the SDK logs each invalid message of a server, with its text
    logging.getLogger(_name).setLevel(logging.CRITICAL)
for _name in ("httpx2", "httpcore2"):  # they log each request with its URL
    logging.getLogger(_name).setLevel(logging.WARNING)


@dataclass(frozen=True, slots=True)
class McpConnection:
    """How the messages reach the server.

    Args:
        transport: the SDK's.
        ended, flood: return for people why nothing comes any more; empty: it may come.
        secret: what the server was sent and must not be in an error, such as a bearer token; empty: nothing.
    """

    transport: Transport
    ended: Callable[[], str]
    flood: Callable[[], str] = lambda: ""
    secret: str = field(default="", repr=False)

    def without_secret(self, text: str) -> str:
        """Return a text of the server without the secret."""
        return text.replace(self.secret, "[redacted]") if self.secret else text

    def shown(self, text: str) -> str:
        """Return a text with words of the server as an error quotes it: cut, on one line, and without the secret."""
        cut = self.without_secret(text)[:_LONGEST_TEXT]
        return "".join(each if each.isprintable() else " " for each in cut)


class McpSession:
    """An open session. All its methods may be called concurrently, and cancelled; the server is told of a cancelled call."""

    def __init__(self, name: str, session: ClientSession, connection: McpConnection, limits: McpLimits) -> None:
        self._name = name
        self._session = session
        self._connection = connection
        self._limits = limits

    @property
    def has_handshake(self) -> bool:
        """Whether the server speaks a protocol version with a handshake and sessions, up to 2025-11-25."""
        return self._session.protocol_version in HANDSHAKE_PROTOCOL_VERSIONS

    async def list_tools(self) -> Sequence[ListedTool]:
        """Return the tools of all pages. Raises `ToolFailed`."""
        try:
            return await self._all_pages()
        except (MCPError, ValidationError, RuntimeError) as error:
            raise self._failure("its list of tools", error) from None

    async def call(self, call: ToolsetCall) -> Content:
        """Run one call. Raises `ToolError`, `ToolFailed` and `ToolsetLost` as the port says."""
        try:
            result = await self._request(call)
        except (MCPError, ValidationError, RuntimeError) as error:
            raise self._failure(f"the result of {call.name}", error) from None
        if isinstance(result, InputRequiredResult):
            raise self._failed(f"{call.name} asks for input of a person or a model, which a rollout does not give")
        try:
            return content_of_result(result)
        except ToolFailed as error:
            raise self._failed(str(error), error.kind) from None
        except ToolError as error:
            raise ToolError(self._connection.without_secret(str(error))) from None

    async def _request(self, call: ToolsetCall) -> CallToolResult | InputRequiredResult:
        meta: dict[str, Any] = {UID_META_KEY: call.uid, CALL_META_KEY: call.key, **trace_headers()}
        request = CallToolRequest(
            params=CallToolRequestParams(name=call.name, arguments=dict(call.arguments), _meta=meta)
        )
        try:
            return await self._session.send_request(request, _RESULT)
        except MCPError as error:
            if error.code != HEADER_MISMATCH:
                raise
        # The tool did not run: the server wants arguments in headers that its list of tools names.
        await self._all_pages()
        return await self._session.send_request(request, _RESULT)

    async def _all_pages(self) -> Sequence[ListedTool]:
        found: list[ListedTool] = []
        size, cursor, cursors = 0, None, set[str]()
        while True:
            page = await self._session.list_tools(params=PaginatedRequestParams(cursor=cursor) if cursor else None)
            listed = [_listed(tool) for tool in page.tools]
            found += listed
            size += sum(len(tool.parameters_json_schema) + len(tool.description) for tool in listed)
            if len(found) > self._limits.tools or size > self._limits.list_bytes:
                raise self._failed(
                    f"it lists more than {self._limits.tools:,} tools or {self._limits.list_bytes:,} bytes of them; "
                    "serve fewer at one address"
                )
            cursor = page.next_cursor
            if not cursor:
                return found
            if cursor in cursors or len(cursors) >= self._limits.pages:
                raise self._failed(f"its list of tools does not end: page {len(cursors) + 2} names a further one")
            cursors.add(cursor)

    def _failure(self, what: str, error: MCPError | ValidationError | RuntimeError) -> ToolFailed:
        """Return the failure for an error of the SDK. `what` is what was expected."""
        reason = failure_text(what, error)
        lost = self._connection.ended()
        if lost:
            return ToolsetLost(f"the MCP server {self._name} is gone: {self._connection.shown(lost)}", "ToolsetLost")
        if isinstance(error, MCPError) and error.code == CONNECTION_CLOSED and self._connection.flood():
            reason = self._connection.flood()
        return self._failed(reason, type(error).__name__)

    def _failed(self, text: str, kind: str = "") -> ToolFailed:
        return ToolFailed(f"the MCP server {self._name}: {self._connection.shown(text)}", kind)


def failure_text(what: str, error: BaseException) -> str:
    """Return why a request failed. Never quotes a response that is not JSON-RPC: it may be of any service."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    match error:
        case MCPError(code=code, message=text) if code == CONNECTION_CLOSED:
            return text
        case MCPError(code=code) if code == PARSE_ERROR:
            return f"{what} is not a JSON-RPC message"
        case MCPError(code=code, message=text):
            return f"error {code}: {text}"
        case ValidationError():
            first = error.errors(include_input=False, include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            return f"{what} does not have the form that MCP defines: {where}: {first['msg']}"
        case ToolFailed():
            return str(error)
    return f"{type(error).__name__}: {error}"


@asynccontextmanager
async def open_session(name: str, connection: McpConnection, mode: str, limits: McpLimits) -> AsyncIterator[McpSession]:
    """Open a session in one of the SDK's modes. Entering raises `ToolFailed`."""
    client = Client(
        connection.transport,
        mode=mode,
        cache=None,
        client_info=Implementation(name="rollout-server", version=version("rollout-server")),
    )
    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(client)
        except Exception as error:
            reason = connection.ended() or connection.flood() or failure_text("its first response", error)
            text = f"the MCP server {name} could not be opened: {connection.shown(reason)}"
            raise ToolFailed(text, type(error).__name__) from None
        yield McpSession(name, client.session, connection, limits)


@asynccontextmanager
async def http_connection(
    url: str, headers: dict[str, str], lookup: CheckedLookup | None, limits: McpLimits, tls: ssl.SSLContext
) -> AsyncIterator[McpConnection]:
    """Open the HTTP client of a session; with a `lookup`, for the addresses that it allows."""
    transport = McpHttpTransport(HttpLimits(limits.response_bytes, tls), lookup)
    async with http_client(transport, headers) as client:
        streams = streamable_http_client(url, http_client=client, max_sse_event_size=limits.response_bytes)
        checked = CheckedTransport(streams, limits.tools, lambda: transport.lost)
        secret = headers.get("authorization", "").removeprefix("Bearer ")
        yield McpConnection(checked.open(), lambda: checked.ended, lambda: transport.flood, secret)


def stdio_connection(
    start: ProcessStart, limits: McpLimits, report: Callable[[str, str], None] | None
) -> McpConnection:
    """Return the connection to a program that is started when the session is opened. `report`: see `StdioServer`."""
    server = StdioTransport(start, report)
    checked = CheckedTransport(server.open(), limits.tools, server.ended)
    return McpConnection(checked.open(), lambda: checked.ended)


def _listed(tool: Tool) -> ListedTool:
    hints = tool.annotations
    idempotent = hints is not None and bool(hints.idempotent_hint or hints.read_only_hint)
    return ListedTool(tool.name, tool.description or "", json.dumps(tool.input_schema), idempotent)
