"""Protocols between the runtime and what executes a tool's code. Processes and tokenizers are behind these ports."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime
from random import Random
from typing import Any, Protocol, TypeGuard, TypeVar, runtime_checkable

from rollout_server.core.message import JSON
from rollout_server.core.spec import TokenizerName
from rollout_server.runtime.errors import ToolError
from rollout_server.runtime.models import ModelClient
from rollout_server.runtime.ports import Content, Tool
from rollout_server.runtime.tools.policy import ToolPolicy
from rollout_server.runtime.tools.toolset import ToolsetSource

_T = TypeVar("_T", bound=JSON)


class Unwritable(ToolError):
    """A result that cannot be converted to text. A mistake of the tool's author, so it is logged.

    Its text begins with that of `unwritable`.
    """


def unwritable(tool: str) -> str:
    """Return the text about a result of a tool that cannot be converted to text, without the reason."""
    return f"The result of {tool} cannot be written"


class ToolFailed(Exception):
    """A tool failed without an exception in this process: its process died, or the exception was raised there.

    Args:
        text: text for the model.
        kind: name of the exception.
        location: file and line where it was raised; empty if unknown.
    """

    def __init__(self, text: str, kind: str = "", location: str = "") -> None:
        super().__init__(text)
        self.kind = kind
        self.location = location


class ToolUnavailable(ToolFailed):
    """A tool could not be run at all: its process did not start, or could not import it. Ends the rollout as a failure."""


class ToolsetLost(ToolFailed):
    """A session with a toolset ended: its program died, the connection broke, or the protocol was violated.

    No further call can succeed in it.
    """


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """Source location of a tool's function, from which another process can import it."""

    module: str
    name: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


class ToolContext(Protocol):
    """The rollout that calls a tool, as the tool sees it: the part of `Run` that any tool may use.

    A tool gets it for each parameter annotated `ToolContext`. In a test without a server, pass any object with the members
    that the tool uses.
    """

    @property
    def uid(self) -> str:
        """The server's id of the rollout."""

    @property
    def rollout_id(self) -> str:
        """The caller's id of the rollout."""

    @property
    def metadata(self) -> Mapping[str, JSON]:
        """The request's metadata object."""

    @property
    def state(self) -> dict[str, Any]:
        """The agent's own data about this rollout. With `process=True` a read-only copy, as parsed from JSON."""

    @property
    def cancelled(self) -> bool:
        """Whether an end of the rollout was requested. Always False in a process, which is killed then."""

    @property
    def logger(self) -> logging.LoggerAdapter[logging.Logger]:
        """Logger whose lines have the rollout's ids. Not with `process=True`."""

    def now(self) -> datetime:
        """Return the time in UTC and record it. Not with `process=True`."""

    def random(self) -> Random:
        """Return the conversation's random generator, whose seed is recorded. Not with `process=True`."""

    def model(self, name: str) -> ModelClient:
        """Return a further model, such as a judge. Not with `process=True`."""

    async def once(self, function: Callable[[], _T | Awaitable[_T]]) -> _T:
        """Call a function, record its result, and return it as parsed from JSON. Not with `process=True`."""


class ToolRunner(Protocol):
    """Executes one call of a tool, also outside the event loop."""

    @property
    def context(self) -> ToolContext | None:
        """The rollout that calls the tool; None if there is none."""

    async def in_thread(self, work: Callable[[], object]) -> object:
        """Run a function in a thread. On cancellation the thread is abandoned (D18)."""

    async def in_process(self, arguments: Mapping[str, JSON], context_json: str) -> Content:
        """Run the tool in its process. Cancellation kills the process. Raise the tool's error, or `ToolFailed`.

        `context_json` is the result of `process_context.context_json`; empty for a tool that takes no context.
        """

    async def in_toolset(self, source: ToolsetSource, name: str, arguments: Mapping[str, JSON]) -> Content:
        """Run a tool of a toolset in the rollout's session. Raise what `ToolsetSession.call` raises."""


@runtime_checkable
class ServerRunTool(Tool, Protocol):
    """A tool whose code this server executes according to the tool's policy."""

    @property
    def policy(self) -> ToolPolicy:
        """How its calls are executed."""

    @property
    def definition(self) -> ToolDefinition:
        """Where it is defined."""

    @property
    def threaded(self) -> bool:
        """Whether its function is synchronous."""

    async def run_by(self, runner: ToolRunner, arguments: Mapping[str, JSON]) -> Content:
        """Run one call. Raise the same errors as `Tool.run`."""

    def run_here(self, arguments: Mapping[str, JSON], context: ToolContext | None = None) -> Content:
        """Run one call in this thread, whatever its policy: used inside its process. Raise the same errors as `Tool.run`."""


_server_run: dict[type, bool] = {}


def is_server_run(tool: object) -> TypeGuard[ServerRunTool]:
    """Return whether a tool is a `ServerRunTool`. Asked several times per call, and `isinstance` takes 30 us for a protocol."""
    kind = type(tool)
    known = _server_run.get(kind)
    if known is None:
        known = _server_run[kind] = isinstance(tool, ServerRunTool)
    return known


def is_idempotent(tool: object) -> bool:
    """Return whether repeated calls of a tool are harmless, also with another key: this server runs it, and its policy says so."""
    return is_server_run(tool) and tool.policy.idempotent


class ToolWorker(Protocol):
    """A process that executes one call."""

    async def call(self, arguments: Mapping[str, JSON], context_json: str) -> Content:
        """Run the call, only one at a time. Cancellation kills the process. Raise the tool's error, or `ToolFailed`."""


class ToolProcesses(Protocol):
    """Executes tools in processes."""

    def open(self, definition: ToolDefinition, policy: ToolPolicy) -> AbstractAsyncContextManager[ToolWorker]:
        """Wait for a free slot and a process that has imported the tool. Raise `ToolFailed`."""

    async def close(self) -> None:
        """End all processes."""


class TokenCounter(Protocol):
    """Measures texts in tokens."""

    async def fitting(self, name: TokenizerName, text: str, tokens: int) -> int | None:
        """Return how many characters the first `tokens` tokens of a text cover; None if the tokenizer is not available."""
