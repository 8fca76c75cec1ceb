"""`rollout config`: print the effective settings."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from rollout_server.cli.errors import report_errors


def config(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Print the effective settings with their environment names and descriptions. Secrets are hidden."""
    from pydantic import SecretStr

    from rollout_server.settings import Settings, load, names_of

    with report_errors("config"):
        settings = load()
    values = {name: getattr(settings, name) for name in Settings.model_fields}
    visible_values = {name: "(hidden)" if isinstance(value, SecretStr) else value for name, value in values.items()}
    if as_json:
        typer.echo(json.dumps(visible_values, default=str, indent=2))
        return
    for name, field in Settings.model_fields.items():
        first, *others = names_of(name)
        typer.secho(f"{first}={visible_values[name]}", bold=True)
        also = f" Also {', '.join(others)}." if others else ""
        typer.echo(f"    {field.description}{also}")
