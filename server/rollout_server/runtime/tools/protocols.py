"""Protocols between the runtime and what executes a tool's code. Processes and tokenizers are behind these ports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from rollout_server.core.message import JSON
from rollout_server.core.spec import TokenizerName
from rollout_server.runtime.errors import ToolError
from rollout_server.runtime.ports import Content
from rollout_server.runtime.tools.policy import ToolPolicy


class Unwritable(ToolError):
    """A result that cannot be converted to text. A mistake of the tool's author, so it is logged."""


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


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """Source location of a tool's function, from which another process can import it."""

    module: str
    name: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class ToolRunner(Protocol):
    """Executes code outside the event loop."""

    async def in_thread(self, work: Callable[[], object]) -> object:
        """Run a function in a thread. On cancellation the thread is abandoned (D18)."""

    async def in_process(self, arguments: Mapping[str, JSON]) -> Content:
        """Run the tool in its process. Cancellation kills the process. Raise the tool's error, or `ToolFailed`."""


@runtime_checkable
class ServerRunTool(Protocol):
    """A tool whose code this server executes according to the tool's policy."""

    @property
    def name(self) -> str:
        """Name, unique within the agent."""

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

    def run_here(self, arguments: Mapping[str, JSON]) -> Content:
        """Run one call in this thread, whatever its policy: used inside its process. Raise the same errors as `Tool.run`."""


class ToolWorker(Protocol):
    """A process that executes one call."""

    async def call(self, arguments: Mapping[str, JSON]) -> Content:
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
