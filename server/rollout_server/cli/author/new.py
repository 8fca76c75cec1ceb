"""`rollout new`: a project to begin with."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from rollout_server.cli.errors import report_errors
from rollout_server.cli.json_output import AsJson, open_output


def new(
    name: Annotated[
        str, typer.Argument(help="The agent's name: small letters, digits, - and _; a folder of it is made.")
    ],
    inside: Annotated[Path, typer.Option("--in", help="Where the folder goes.")] = Path(),
    as_json: AsJson = False,
) -> None:
    """Make a small agent project that runs: an agent with a tool, a test, a dataset, and a scripted model that stands in for one.

    With --json: {"project": {"name", "directory", "files"}, "next": [commands]}.
    """
    with report_errors("new"), open_output(as_json=as_json) as output:
        from rollout_server.authoring.project import NEXT, make_project

        made = make_project(name, inside)
        folder = inside / name
        listed = {"name": name, "directory": str(folder), "files": [str(path) for path in made]}
        commands = [f"cd {shlex.quote(str(folder))}", *NEXT]
        output.write({"project": listed, "next": commands})
        typer.echo(f"made {folder} with {', '.join(map(str, made))}")
        typer.echo("next:\n" + "\n".join(f"  {command}" for command in commands))
