"""MCP servers as a source of an agent's tools."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal, TypedDict, Unpack
from urllib.parse import urlsplit

from rollout_server.runtime.tools.policy import ToolPolicy
from rollout_server.runtime.tools.toolset import McpServer

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class McpOptions(TypedDict, total=False):
    """Further keyword arguments of `mcp`, which documents them."""

    timeout: float | None
    retries: int
    idempotent: bool | Iterable[str] | None
    concurrency: int | None
    server_concurrency: int | None
    max_output_tokens: int | None
    bearer_variable: str
    environment: Iterable[str]
    directory: str


def mcp(
    server: str | Sequence[str],
    *,
    include: Iterable[str] | None = None,
    session: Literal["rollout", "shared"] = "rollout",
    **options: Unpack[McpOptions],
) -> McpServer:
    """Offer the tools of an MCP server: `tools = (mcp("https://..."), mcp(["npx", "-y", "server-name"]))`.

    Each call has the uid of its rollout in `_meta`, as "osmosis.rollout/uid", and a key that is equal for all attempts at the call,
    as "osmosis.rollout/call-key". A server of the protocol 2026-07-28 has no sessions; it tells rollouts apart by the uid.

    Args:
        server: URL of a server with the streamable HTTP transport, or a command that is started and spoken to over its standard
            input and output.
        include: names of the tools to offer; None: all.
        session: "rollout" opens a session for each rollout, which for a command is a process; "shared" opens one for all rollouts.
        timeout: seconds for one call with its retries; None: no limit but the rollout's. Default: 60.
        retries: attempts after the first if a call fails without a result. Only for idempotent tools.
        idempotent: names of the tools whose calls are harmless to repeat; True: all; False: none; None: those that the server
            marks with `idempotentHint` or `readOnlyHint`.
        concurrency: concurrent calls of one tool in one rollout; None: no limit.
        server_concurrency: concurrent calls of one tool in all rollouts of this server; None: no limit.
        max_output_tokens: results are truncated to this many tokens.
        bearer_variable: name of the environment variable with the bearer token for a URL; empty: no token.
        environment: names of the environment variables that a command inherits, in addition to basic ones such as PATH.
        directory: working directory of a command; empty: this server's.

    Raises:
        TypeError: for an argument of the wrong type.
        ValueError: for a value that cannot be used. The text does not repeat a URL, which may contain a password.
    """
    address = _address(server)
    if session not in ("rollout", "shared"):
        raise ValueError(f'mcp: session must be "rollout" or "shared", not {session!r}')
    unknown = sorted(set(options) - set(McpOptions.__annotations__))
    if unknown:
        takes = ", ".join(("include", "session", *McpOptions.__annotations__))
        raise TypeError(f"mcp takes no {unknown[0]!r}; it takes {takes}")
    bearer_variable, directory = options.get("bearer_variable", ""), options.get("directory", "")
    environment, retries = _names("environment", options.get("environment", ())), options.get("retries", 0)
    for variable in (*environment, *((bearer_variable,) if bearer_variable else ())):
        if not _VARIABLE.fullmatch(variable):
            raise ValueError("mcp: bearer_variable and environment take names of environment variables, not values")
    if isinstance(address, tuple) and bearer_variable:
        raise ValueError("mcp: bearer_variable is for a URL; a command inherits the variables in environment")
    if isinstance(address, str) and (environment or directory):
        raise ValueError("mcp: environment and directory are for a command, not for a URL")
    ToolPolicy(retries=retries, idempotent=True)  # checks the number
    idempotent = options.get("idempotent")
    return McpServer(
        address,
        include=None if include is None else _names("include", include),
        session=session,
        policy=ToolPolicy(
            timeout=options.get("timeout", 60.0),
            concurrency=options.get("concurrency"),
            server_concurrency=options.get("server_concurrency"),
            max_output_tokens=options.get("max_output_tokens"),
        ),
        bearer_variable=bearer_variable,
        environment=environment,
        directory=directory,
        retries=retries,
        idempotent=idempotent
        if idempotent is None or isinstance(idempotent, bool)
        else _names("idempotent", idempotent),
    )


def _address(server: object) -> str | tuple[str, ...]:
    if isinstance(server, str):
        return _url(server)
    if not isinstance(server, list | tuple):
        raise TypeError(f"mcp: server must be a URL or a command as a list of texts, not {type(server).__name__}")
    if not server or not all(isinstance(part, str) and part and "\0" not in part for part in server):
        raise ValueError("mcp: a command is a list of texts, none of them empty: the program, then its arguments")
    return tuple(server)


def _url(url: str) -> str:
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises for a port that is not a number
    except ValueError:
        raise ValueError("mcp: the server's URL cannot be parsed") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("mcp: a server is a URL that begins with http:// or https://, or a command as a list of texts")
    if "@" in parts.netloc:
        raise ValueError("mcp: a URL must not contain a user name or password; use bearer_variable")
    if "#" in url:
        raise ValueError("mcp: a URL must not have a fragment: remove '#' and what follows")
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError("mcp: a URL consists of printable ASCII characters without spaces; encode others with %")
    return url


def _names(option: str, names: object) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise TypeError(f"mcp: {option} must be a list of names, not {names!r}")
    found = tuple(names)
    if not all(isinstance(name, str) and name for name in found):
        raise TypeError(f"mcp: {option} must be a list of names, each a text that is not empty")
    twice = next((name for name in found if found.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"mcp: {option} lists {twice!r} twice")
    return found
