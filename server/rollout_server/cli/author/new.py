"""`rollout new`: create an agent project."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from rollout_server.cli.errors import report_errors
from rollout_server.cli.json_output import AsJson, open_output


def new(
    name: Annotated[
        str, typer.Argument(help="Name of the agent and its directory: lower-case letters, digits, - and _.")
    ],
    inside: Annotated[Path, typer.Option("--in", help="Parent directory.")] = Path(),
    as_json: AsJson = False,
) -> None:
    """Create an agent project: a tool, a reward, a test, a dataset and a mock model.

    With --json: {"project": {"name", "directory", "files"}, "next": commands}.
    """
    with report_errors("new"), open_output(as_json=as_json) as output:
        from rollout_server.authoring.project import NEXT, make_project

        made = make_project(name, inside)
        folder = inside / name
        listed = {"name": name, "directory": str(folder), "files": [str(path) for path in made]}
        commands = [f"cd {shlex.quote(str(folder))}", *NEXT]
        output.write({"project": listed, "next": commands})
        typer.echo(f"created {folder} with {', '.join(map(str, made))}")
        typer.echo("next:\n" + "\n".join(f"  {command}" for command in commands))
