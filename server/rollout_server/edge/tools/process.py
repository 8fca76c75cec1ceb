"""One process of tools, as the server sees it."""

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
from rollout_server.runtime.tools.protocols import ToolDefinition, ToolFailed, Unwritable

_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[2:]; from rollout_server.edge.tools.worker import main; main(int(sys.argv[1]))"
)
_LOCALE = ("LANG", "LANGUAGE", "TZ")
_PLACES = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "SSL_CERT_FILE", "SSL_CERT_DIR")
_PASSED_ON = frozenset({"USER", "LOGNAME", *_LOCALE, *_PLACES})
"""Variables that programs need and that hold no secrets. Python's own and `LC_*` come on top."""
_GRACE_SECONDS = 5.0
"""How long a supervisor may take to end all that its tools have started."""


class ToolProcess:
    """Made by `start`, runs one call at a time, under a supervisor that ends whatever a tool has started."""

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
        """A process that has nothing imported yet. `variables` of the server's are passed on to it. Raises `ToolFailed`."""
        hide_memory()  # the settings of the server, keys among them, are in its environment and memory
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
                    env=_environment(frozenset(variables)),
                )
            except BaseException as error:
                streams[1].close()
                if isinstance(error, OSError):
                    raise ToolFailed(f"The tool's process could not be started: {error.strerror}", "OSError") from error
                raise
        return cls(process, streams)

    @property
    def alive(self) -> bool:
        """It takes calls."""
        return self._process.returncode is None and not self._killed

    async def call(self, name: str, arguments: Mapping[str, JSON]) -> Content:
        """Runs one call of the tool with this name in its module. Raises as the tool does, or `ToolFailed`.

        Whatever ends it but an answer kills the process.
        """
        self._calls += 1
        try:
            answer = await self._request({"call": self._calls, "name": name, "arguments": arguments})
            if answer.get("call") != self._calls:  # a tool wrote it, or a copy of the process that it has forked
                raise BadFrame
            return _content(answer)
        except (asyncio.CancelledError, BadFrame, EOFError, OSError) as error:
            self.kill()
            if isinstance(error, asyncio.CancelledError):
                raise
            if isinstance(error, BadFrame):
                raise ToolFailed("The tool's process gave an answer that is none", "BadFrame") from None
            text, kind = _end(await self._ended)
            raise ToolFailed(text, kind) from None

    def kill(self) -> None:
        """Hangs up, upon which its supervisor ends it with all that it has started."""
        self._killed = True
        self._writer.transport.abort()  # what was not sent yet would be waited for

    async def ended(self) -> None:
        """Waits until it is reaped, after `kill`. A supervisor that does not end, as one that a tool has stopped, is killed."""
        await asyncio.wait({self._ended}, timeout=_GRACE_SECONDS)
        if not self._ended.done():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await asyncio.wait({self._ended})

    async def load(self, definition: ToolDefinition, policy: ToolPolicy, seconds: float) -> None:
        """Has it import the tool's module, which may take `seconds`. Raises `ToolFailed`."""
        opening = {
            "module": definition.module,
            "file": definition.file,
            "memory_bytes": policy.memory_bytes or MEMORY_BYTES,
            "cpu_seconds": policy.cpu_seconds or CPU_SECONDS,
            "fresh": policy.process == "fresh",
        }
        try:
            async with asyncio.timeout(seconds):
                answer = await self._request(opening)
        except TimeoutError:
            raise ToolFailed(f"The tool could not be imported within {seconds:g} s", "TimeoutError") from None
        except (BadFrame, EOFError, OSError):
            self.kill()
            text, kind = _end(await self._ended)
            raise ToolFailed(f"The tool could not be imported. {text}", f"{kind} as it was imported") from None
        if "error" in answer:
            place = str(answer.get("place", ""))
            text, kind = (
                f"The tool could not be imported: {answer.get('text')}",
                f"{answer.get('kind')} as it was imported",
            )
            raise ToolFailed(text, kind, place)

    async def _request(self, question: Mapping[str, object]) -> Mapping[str, JSON]:
        """The next answer. A process that has ended gives none, even if another one holds its connection open."""
        self._writer.write(framed(question))
        answer = asyncio.ensure_future(read(self._reader))
        try:
            await asyncio.wait({answer, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                await asyncio.wait({answer}, timeout=0.1)  # what it said before it ended may still be on its way
            if answer.done():
                return answer.result()
            raise EOFError
        finally:
            answer.cancel()


def _environment(more: Set[str]) -> Mapping[str, str]:
    """The variables of a process of tools: those that it cannot do without, and `more`. Others may hold anybody's secrets."""
    return {name: value for name, value in os.environ.items() if name in _PASSED_ON | more or _harmless(name)}


def _harmless(name: str) -> bool:
    return name.startswith("LC_") or (name.startswith("PYTHON") and "_" not in name)


def _content(answer: Mapping[str, JSON]) -> Content:
    content = answer.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        return cast("Sequence[Mapping[str, JSON]]", content)
    text = answer.get("text")
    if not isinstance(text, str):
        raise BadFrame
    match answer.get("error"):
        case "argument":
            raise ArgumentError(text)
        case "tool":
            raise ToolError(text)
        case "unwritable":
            raise Unwritable(text)
    raise ToolFailed(text, str(answer.get("kind", "")), str(answer.get("place", "")))


def _end(status: int) -> tuple[str, str]:
    """How a process ended, for the model and in a word."""
    if status == -signal.SIGXCPU:
        return "The tool's process had used up its processor time", "SIGXCPU"
    if status < 0:
        return f"The tool's process was ended by {_signal(-status)}", _signal(-status)
    return f"The tool's process exited with status {status}", f"exit status {status}"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
