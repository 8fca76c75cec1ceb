"""`rollout serve`: the server."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from rollout_server.agent import Agent
from rollout_server.cli.complain import complaining


def serve(
    agents: Annotated[
        list[str] | None,
        typer.Argument(
            help="Agents as MODULE:OBJECT or FILE.py:OBJECT; the first is the default. None: the calculator."
        ),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    http_port: Annotated[int | None, typer.Option(help="HTTP port; 0: any.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="gRPC port; 0: any.")] = None,
    tokenizer: Annotated[
        list[str] | None, typer.Option(help="NAME=DIRECTORY, repeatable; the directory 'toy' is the built-in one.")
    ] = None,
    log_format: Annotated[str | None, typer.Option(help="text or json.")] = None,
) -> None:
    """Serve agents over gRPC and HTTP until SIGTERM or Ctrl-C.

    Everything else is set through the environment or .env: see `rollout config`.
    """
    flags: dict[str, object] = {"host": host, "http_port": http_port, "grpc_port": grpc_port, "log_format": log_format}
    if tokenizer:
        flags["tokenizers"] = dict(_pair(text) for text in tokenizer)
    given = {name: value for name, value in flags.items() if value is not None}
    chosen = [_agent(name) for name in agents or []]
    with complaining("serve"):
        from rollout_server import app  # gRPC takes its time
        from rollout_server.calculator import Calculator
        from rollout_server.settings import load

        app.serve(*(chosen or [Calculator(delay=load(**given).calculator_delay_seconds)]), **given)


def _pair(text: str) -> tuple[str, Path]:
    name, separator, directory = text.partition("=")
    if not separator or not name or not directory:
        raise typer.BadParameter(f"{text!r} is not NAME=DIRECTORY", param_hint="--tokenizer")
    return name, Path(directory)


def _agent(name: str) -> Agent:
    """Imports an agent: an instance, or a class that is made without arguments."""
    place, _, attribute = name.rpartition(":")
    if not place:
        raise typer.BadParameter(f"{name!r} is not MODULE:OBJECT", param_hint="AGENTS")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    found = getattr(module, attribute, None)
    with _importing(name):
        made = found() if isinstance(found, type) and issubclass(found, Agent) else found
    if not isinstance(made, Agent):
        raise typer.BadParameter(f"{attribute!r} in {place} is not an Agent", param_hint="AGENTS")
    return made


def _load_module(name: str) -> object:
    sys.path.insert(0, str(Path.cwd()))
    with _importing(name):
        return importlib.import_module(name)


def _load_file(path: Path) -> object:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise typer.BadParameter(f"there is no file {path}", param_hint="AGENTS")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    with _importing(str(path)):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _importing(place: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # an author's file may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        text = f"{place} cannot be imported: {type(error).__name__}: {error}{where}"
        raise typer.BadParameter(text, param_hint="AGENTS") from None
