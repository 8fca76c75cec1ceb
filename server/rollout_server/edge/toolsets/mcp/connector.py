"""Opens sessions with MCP servers: programs, and URLs of agents and of requests."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rollout_server.edge.programs.supervised import ProcessStart
from rollout_server.edge.targets.resolver import CheckedLookup
from rollout_server.edge.tools.process import basic_environment
from rollout_server.edge.toolsets.mcp.limits import McpLimits
from rollout_server.runtime.tools.protocols import ToolFailed
from rollout_server.runtime.tools.toolset import McpServer, RequestedToolset, ToolsetCaller, ToolsetSession

if TYPE_CHECKING:
    from rollout_server.edge.toolsets.mcp.session import McpConnection

_log = logging.getLogger(__name__)
_SESSION_MODULE: Final = "rollout_server.edge.toolsets.mcp.session"
_UID_HEADER: Final = "x-rollout-uid"
"""Has the uid of the rollout that a session belongs to, so that a load balancer can send all its requests to one replica.

The bodies have the uid, too, but load balancers do not read bodies, and a server without sessions gives them nothing else to go by.
"""
_MOST_NAMES: Final = 1000
"""Names of servers that requests name and that are remembered to speak an older protocol."""


class McpConnector:
    """Opens sessions with MCP servers. Lives on one event loop.

    Args:
        lookup: resolves the hosts of URLs that requests name, as the target rules allow. URLs of agents are not restricted.
        tls_ca: file with the certificates that verify https servers; None: the system's.
        limits: limits of what a server may send.
    """

    def __init__(self, lookup: CheckedLookup, tls_ca: Path | None = None, limits: McpLimits | None = None) -> None:
        self._lookup = lookup
        self._tls_ca = tls_ca
        self._limits = limits or McpLimits()
        self._tls: ssl.SSLContext | None = None
        self._handshake: set[str] = set()

    @asynccontextmanager
    async def connect(
        self, source: McpServer | RequestedToolset, caller: ToolsetCaller
    ) -> AsyncIterator[ToolsetSession]:
        """Open a session. Entering raises `ToolFailed`. It is entered and left in one task."""
        await asyncio.to_thread(import_module, _SESSION_MODULE)  # not on the event loop: it takes more than a second
        from rollout_server.edge.toolsets.mcp import session as mcp_session

        name, failure = str(source), None
        async with AsyncExitStack() as stack:
            connection = await self._connection(stack, source, caller)
            # A server without the newer protocol is not asked for it again: that takes a request, of old programs 10 s.
            mode = "legacy" if name in self._handshake else "auto"
            try:
                opening = mcp_session.open_session(name, connection, mode, self._limits)
                session = await stack.enter_async_context(opening)
            except BaseException:  # the server may be another one now, which does not respond to a handshake
                self._handshake.discard(name)
                raise
            # Requests may name any number of servers, agents only those that their code names.
            if session.has_handshake and (isinstance(source, McpServer) or len(self._handshake) < _MOST_NAMES):
                self._handshake.add(name)
            try:
                yield session
            except Exception as error:  # raised below: the SDK's task groups would wrap it
                failure = error
        if failure is not None:
            raise failure

    async def _connection(
        self, stack: AsyncExitStack, source: McpServer | RequestedToolset, caller: ToolsetCaller
    ) -> McpConnection:
        from rollout_server.edge.toolsets.mcp import session as mcp_session

        if isinstance(source, McpServer) and isinstance(source.address, tuple):
            environment, directory = basic_environment(frozenset(source.environment)), Path(source.directory or ".")
            start = ProcessStart(
                source.address, directory, environment, has_stdin=True, limit=self._limits.response_bytes
            )
            return mcp_session.stdio_connection(start, self._limits, _stderr_report(source, caller))
        headers = {**_credentials(source, caller), **({_UID_HEADER: caller.uid} if caller.uid else {})}
        checked = self._lookup if isinstance(source, RequestedToolset) else None
        return await stack.enter_async_context(
            mcp_session.http_connection(_url(source), headers, checked, self._limits, self._tls_context())
        )

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:  # reading the system's certificates takes some milliseconds
            self._tls = ssl.create_default_context(cafile=self._tls_ca)
        return self._tls


def _stderr_report(source: McpServer, caller: ToolsetCaller) -> Callable[[str, str], None] | None:
    """Return what logs the last lines of a program's standard error; None if the error quotes them.

    They may have paths and secrets, so models must not read them. Only people read the errors of a session that belongs to no
    rollout and is not shared: it is opened for the start of a server, or for a command.
    """
    if not caller.uid and source.session != "shared":
        return None

    def report(ending: str, last: str) -> None:
        extra = {"rollout_uid": caller.uid} if caller.uid else None
        _log.warning("the MCP server %s: %s; its standard error ends with:\n%s", source, ending, last, extra=extra)

    return report


def _url(source: McpServer | RequestedToolset) -> str:
    return source.target.url if isinstance(source, RequestedToolset) else str(source.address)


def _credentials(source: McpServer | RequestedToolset, caller: ToolsetCaller) -> dict[str, str]:
    if isinstance(source, RequestedToolset):
        bearer = caller.bearer
    elif not source.bearer_variable:
        bearer = ""
    else:
        bearer = os.environ.get(source.bearer_variable, "")
        if not bearer:
            text = f"set the environment variable {source.bearer_variable} of this server to its bearer token"
            raise ToolFailed(f"the MCP server {source} could not be opened: {text}")
    if not bearer.isascii() or not bearer.isprintable():
        raise ToolFailed(
            f"the MCP server {source} could not be opened: its bearer token has characters that no header may have"
        )
    return {"authorization": f"Bearer {bearer}"} if bearer else {}
