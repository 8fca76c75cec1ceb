"""`rollout config`: the settings as they are in force."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def config(as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False) -> None:
    """Print the settings in force, their environment names and what they mean. Secrets are not shown."""
    from pydantic import AliasChoices, SecretStr

    from rollout_server.settings import Settings

    settings = Settings()
    values = {name: getattr(settings, name) for name in Settings.model_fields}
    shown = {name: "(hidden)" if isinstance(value, SecretStr) else value for name, value in values.items()}
    if as_json:
        typer.echo(json.dumps(shown, default=str, indent=2))
        return
    for name, field in Settings.model_fields.items():
        alias = field.validation_alias
        names = [str(choice) for choice in alias.choices] if isinstance(alias, AliasChoices) else [name.upper()]
        typer.secho(f"{names[0]}={shown[name]}", bold=True)
        also = f" Also {', '.join(names[1:])}." if names[1:] else ""
        typer.echo(f"    {field.description}{also}")
