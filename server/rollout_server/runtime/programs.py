"""Port to programs that a server runs for its rollouts, such as an agent that owns its loop."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rollout_server.core.outcome import Category, Failure, FailureClass
from rollout_server.runtime.errors import RolloutFailed


@dataclass(frozen=True, slots=True)
class ProgramStart:
    """How to start a program.

    Args:
        command: the program and its arguments.
        directory: its working directory.
        environment: its variables. Of the server's own only basic ones are added, such as PATH, and the trace; these replace them.
        stdin: text of its standard input.
    """

    command: tuple[str, ...]
    directory: Path
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    stdin: str = field(default="", repr=False)


class RunningProgram(Protocol):
    """A program that was started."""

    @property
    def stdout(self) -> str:
        """What it has written to its standard output: beginning and end, if it is more than is kept."""

    @property
    def stderr(self) -> str:
        """What it has written to its standard error, kept as `stdout` is."""

    async def wait(self) -> int:
        """Wait for its end and return its exit code; minus the number of the signal that killed it.

        Raises `RolloutFailed` if it could not be executed.
        """


class Programs(Protocol):
    """Runs programs."""

    def start(self, start: ProgramStart) -> AbstractAsyncContextManager[RunningProgram]:
        """Start a program. On leaving the context, it has ended together with all processes that it started.

        Raises `RolloutFailed` if it cannot be started.
        """

    async def close(self) -> None:
        """Wait for the end of all programs."""


class NoPrograms:
    """A server that runs no programs: the default."""

    def start(self, start: ProgramStart) -> AbstractAsyncContextManager[RunningProgram]:
        """Raise `RolloutFailed`, because this server runs no programs."""
        raise program_failed("this server runs no programs")

    async def close(self) -> None:
        """Return at once: there are no programs."""


def program_failed(text: str, turn: int = 0) -> RolloutFailed:
    """Return the error of a program that did not do its work."""
    return RolloutFailed(Failure(Category.INTERNAL, text, turn, source=FailureClass.ENVIRONMENT))
