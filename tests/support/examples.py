"""The folders in `examples/`: their commands, agents and rows, and a record of the calls of an agent's methods."""

from __future__ import annotations

import functools
import inspect
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rollout_server import Agent, Run
from rollout_server.authoring.agent_loader import find_agents
from rollout_server.authoring.dataset import DatasetRow
from rollout_server.cli.commands import app
from rollout_server.cli.flags import CompletionFlags, pick_flags

from tests.support.datasets import read_rows

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
FOLDERS = sorted(path.parent.name for path in EXAMPLES.glob("*/agent.py"))
METHODS = ("setup", "play", "reward", "cleanup")
OnCall = Callable[[str, Run], None]
"""Called with the name of a method as it begins, and with the name and " ended" as it returns or raises."""


def readme_command(folder: Path) -> Sequence[str]:
    """The arguments of the one `rollout` command in the README of an example."""
    (block,) = re.findall(r"```sh\n(.*?)\n```", (folder / "README.md").read_text(), re.DOTALL)
    program, *arguments = shlex.split(block)
    assert program == "rollout"
    return arguments


@dataclass(frozen=True)
class Example:
    """What the command of an example's README runs."""

    agent: Agent
    rows: Sequence[DatasetRow]
    flags: CompletionFlags


def load_example(folder: Path) -> Example:
    """Load the example in a folder, which must be the working directory."""
    name, *arguments = readme_command(folder)
    group = typer.main.get_command(app)
    command = group.get_command(typer.Context(group), name)  # type: ignore[attr-defined]
    values: dict[str, Any] = command.make_context(name, arguments).params
    [agent] = find_agents([values["target"]])
    return Example(agent, read_rows(Path(values["dataset"])), pick_flags(CompletionFlags, values))


def watch_methods(agent: Agent, on_call: OnCall) -> None:
    """Report the calls of this agent's methods. It then has a `setup` and a `cleanup`, which the server calls."""
    for name in METHODS:
        object.__setattr__(agent, name, _watched(getattr(agent, name), name, on_call))


def _watched(method: Callable[[Run], Any], name: str, on_call: OnCall) -> Callable[[Run], Any]:
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def awaited(run: Run) -> Any:
            on_call(name, run)
            try:
                return await method(run)
            finally:
                on_call(f"{name} ended", run)

        return awaited

    @functools.wraps(method)
    def called(run: Run) -> Any:
        on_call(name, run)
        try:
            return method(run)
        finally:
            on_call(f"{name} ended", run)

    return called


def processes_in(folder: Path) -> Iterator[str]:
    """Yield the command lines of processes whose working directory is in a folder, without zombies and this process."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            where, command = (process / "cwd").readlink(), (process / "cmdline").read_bytes()
        except OSError:  # it has ended, or belongs to the kernel
            continue
        if str(where).startswith(str(folder)) and command and not process.samefile("/proc/self"):
            yield command.replace(b"\0", b" ").decode(errors="replace")
