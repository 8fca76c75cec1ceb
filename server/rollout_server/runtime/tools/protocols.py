"""What runs a tool's code, and what such a tool tells of itself. Processes and tokenizers are behind ports."""

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
    """A result that is no text and cannot be made one: its author's mistake, so it is logged."""


class ToolFailed(Exception):
    """A tool ended in a way that is no exception here: its process died, or it raised something in there.

    Args:
        text: what the model reads.
        kind: the name of the exception.
        location: file and line where it was raised; empty: unknown.
    """

    def __init__(self, text: str, kind: str = "", location: str = "") -> None:
        super().__init__(text)
        self.kind = kind
        self.location = location


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """Where a tool's function is defined, so that another process finds it."""

    module: str
    name: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class ToolRunner(Protocol):
    """What runs code elsewhere than on the event loop."""

    async def in_thread(self, work: Callable[[], object]) -> object:
        """Runs a function in a thread. Cancelled, it leaves the thread alone (D18)."""

    async def in_process(self, arguments: Mapping[str, JSON]) -> Content:
        """Runs the tool in its process. Cancelled, it kills the process. Raises as the tool does, or `ToolFailed`."""


@runtime_checkable
class ServerRunTool(Protocol):
    """A tool whose code is here, and which leaves to the server how it is run."""

    @property
    def name(self) -> str:
        """Unique within the agent."""

    @property
    def policy(self) -> ToolPolicy:
        """How its calls are run."""

    @property
    def definition(self) -> ToolDefinition:
        """Where it is defined."""

    @property
    def threaded(self) -> bool:
        """Its function is a plain one."""

    async def run_by(self, runner: ToolRunner, arguments: Mapping[str, JSON]) -> Content:
        """Runs one call. Raises as `Tool.run` does."""

    def run_here(self, arguments: Mapping[str, JSON]) -> Content:
        """Runs one call in this thread, whatever its policy: what its process does. Raises as `Tool.run` does."""


class ToolWorker(Protocol):
    """A process that runs one call."""

    async def call(self, arguments: Mapping[str, JSON]) -> Content:
        """Runs the call, at most once at a time. Cancelled, it kills the process. Raises as the tool does, or `ToolFailed`."""


class ToolProcesses(Protocol):
    """Runs tools in processes."""

    def open(self, definition: ToolDefinition, policy: ToolPolicy) -> AbstractAsyncContextManager[ToolWorker]:
        """Waits until there is room for a process and it has imported the tool. Raises `ToolFailed`."""

    async def close(self) -> None:
        """Ends all of them."""


class TokenCounter(Protocol):
    """Knows how long texts are in tokens."""

    async def fitting(self, name: TokenizerName, text: str, tokens: int) -> int | None:
        """How many characters the first `tokens` tokens of a text make; None where that tokenizer is not to be had."""
