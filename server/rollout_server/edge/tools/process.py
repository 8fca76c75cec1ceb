"""A tool process, as the server sees it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from typing import cast

from rollout_server.core.message import JSON
from rollout_server.edge.tools.ipc_protocol import BadFrame, framed, read
from rollout_server.edge.tools.supervisor import hide_memory
from rollout_server.runtime.errors import ArgumentError, ToolError
from rollout_server.runtime.ports import Content
from rollout_server.runtime.tools.policy import CPU_SECONDS, MEMORY_BYTES, ToolPolicy
from rollout_server.runtime.tools.protocols import ToolDefinition, ToolFailed, ToolUnavailable, Unwritable

_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[2:]; from rollout_server.edge.tools.worker import main; main(int(sys.argv[1]))"
)
_LOCALE = ("LANG", "LANGUAGE", "TZ")
_PLACES = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "SSL_CERT_FILE", "SSL_CERT_DIR")
_PASSED_ON = frozenset({"USER", "LOGNAME", *_LOCALE, *_PLACES})
"""Environment variables that programs need and that contain no secrets. `LC_*` are added, and for tools Python's own variables."""
_GRACE_SECONDS = 5.0
"""How long a supervisor may take to end all processes that its tools started."""


class ToolProcess:
    """A tool process. Created by `start`, runs one call at a time. Its supervisor ends everything that a tool started."""

    def __init__(
        self, process: asyncio.subprocess.Process, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    ) -> None:
        self._process = process
        self._reader, self._writer = streams
        self._killed = False
        self._calls = 0
        self._ended = asyncio.create_task(process.wait(), name=f"tool process {process.pid}")

    @classmethod
    async def start(cls, variables: Iterable[str] = ()) -> ToolProcess:
        """Start a process that has not imported the tool yet. It inherits these environment `variables`.

        Raise `ToolUnavailable`.
        """
        hide_memory()  # the server's environment and memory contain its API keys, which a tool could read in /proc
        ours, theirs = socket.socketpair()
        streams = await asyncio.open_connection(sock=ours)
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-c", _PROGRAM, str(theirs.fileno()), *sys.path),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                    env={**basic_environment(frozenset(variables)), **_python_variables()},
                )
            except BaseException as error:
                streams[1].close()
                if isinstance(error, OSError):
                    text = f"The tool's process could not be started: {error.strerror}"
                    raise ToolUnavailable(text, "OSError") from error
                raise
        return cls(process, streams)

    @property
    def alive(self) -> bool:
        """Whether it accepts calls."""
        return self._process.returncode is None and not self._killed

    async def call(self, name: str, arguments: Mapping[str, JSON], context_json: str) -> Content:
        """Run one call of the named tool of its module. Raise the tool's error, or `ToolFailed`.

        If the call ends without a response, the process is killed: its connection could still deliver a late response.
        """
        self._calls += 1
        try:
            response = await self._request(
                {"call": self._calls, "name": name, "arguments": arguments, "context_json": context_json}
            )
            if response.get("call") != self._calls:  # written by the tool, or by a process that the tool forked
                raise BadFrame
            return _content(response)
        except (asyncio.CancelledError, BadFrame, EOFError, OSError) as error:
            self.kill()
            if isinstance(error, asyncio.CancelledError):
                raise
            if isinstance(error, BadFrame):
                raise ToolFailed("The tool's process sent an invalid response", "BadFrame") from None
            text, kind = _end(await self._ended)
            raise ToolFailed(text, kind) from None

    def kill(self) -> None:
        """Close the connection. The supervisor then ends itself and everything that it started."""
        self._killed = True
        self._writer.transport.abort()  # `close` would wait for unsent data

    async def ended(self) -> None:
        """Wait for its end after `kill`. A supervisor that does not end, for example because a tool stopped it, is killed."""
        await asyncio.wait({self._ended}, timeout=_GRACE_SECONDS)
        if not self._ended.done():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await asyncio.wait({self._ended})

    async def load(self, definition: ToolDefinition, policy: ToolPolicy, seconds: float) -> None:
        """Import the tool's module within `seconds`. Raise `ToolUnavailable`."""
        opening = {
            "module": definition.module,
            "file": definition.file,
            "memory_bytes": policy.memory_bytes or MEMORY_BYTES,
            "cpu_seconds": policy.cpu_seconds or CPU_SECONDS,
            "fresh": policy.process == "fresh",
        }
        try:
            async with asyncio.timeout(seconds):
                response = await self._request(opening)
        except TimeoutError:
            raise ToolUnavailable(f"The tool could not be imported within {seconds:g} s", "TimeoutError") from None
        except (BadFrame, EOFError, OSError):
            self.kill()
            text, kind = _end(await self._ended)
            raise ToolUnavailable(f"The tool could not be imported. {text}", f"{kind} as it was imported") from None
        if "error" in response:
            location = str(response.get("place", ""))
            text, kind = (
                f"The tool could not be imported: {response.get('text')}",
                f"{response.get('kind')} as it was imported",
            )
            raise ToolUnavailable(text, kind, location)

    async def _request(self, request: Mapping[str, object]) -> Mapping[str, JSON]:
        """Send a request and return the response. Raise EOFError if the process has ended.

        The end of the connection is not enough to detect that: a process that the tool started may keep the connection open.
        """
        self._writer.write(framed(request))
        response = asyncio.ensure_future(read(self._reader))
        try:
            await asyncio.wait({response, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            if not response.done():
                await asyncio.wait({response}, timeout=0.1)  # its last response may still be in the socket buffer
            if response.done():
                return response.result()
            raise EOFError
        finally:
            response.cancel()


def basic_environment(more: Set[str] = frozenset()) -> Mapping[str, str]:
    """Return the variables that any program needs and those in `more`. All others of this process may contain secrets."""
    passed_on = _PASSED_ON | more
    return {name: value for name, value in os.environ.items() if name in passed_on or name.startswith("LC_")}


def _python_variables() -> Mapping[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("PYTHON") and "_" not in name}


def _content(response: Mapping[str, JSON]) -> Content:
    content = response.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        return cast("Sequence[Mapping[str, JSON]]", content)
    text = response.get("text")
    if not isinstance(text, str):
        raise BadFrame
    match response.get("error"):
        case "argument":
            raise ArgumentError(text)
        case "tool":
            raise ToolError(text)
        case "unwritable":
            raise Unwritable(text)
    raise ToolFailed(text, str(response.get("kind", "")), str(response.get("place", "")))


def _end(status: int) -> tuple[str, str]:
    """Return how a process ended: a text for the model, and a short name."""
    if status == -signal.SIGXCPU:
        return "The tool's process exceeded its processor time", "SIGXCPU"
    if status < 0:
        return f"The tool's process was killed by {_signal(-status)}", _signal(-status)
    return f"The tool's process exited with status {status}", f"exit status {status}"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
