"""`rollout tokens`: what a tokenizer and its chat template do to token masks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollout_server.cli.errors import quiet_transformers, report_errors

if TYPE_CHECKING:
    from rollout_server.core.message import JSON
    from rollout_server.edge.tokens.loader import TokenizerFiles
    from rollout_server.tokencheck.report import TemplateReport

tokens = typer.Typer(no_args_is_help=True, help="What a tokenizer and its chat template do to token masks.")

_STABLE, _UNSTABLE, _OF_NO_USE = 0, 1, 2


@tokens.callback()
def _tokens() -> None:
    """With a callback, `check` stays a command of its own although it is the only one."""


@tokens.command()
def check(
    tokenizer: Annotated[
        str, typer.Option(help="A directory, a name that the server's settings map, a name on the Hub, or 'toy'.")
    ],
    template: Annotated[Path | None, typer.Option(help="A file with a chat template instead of its own.")] = None,
    revision: Annotated[str, typer.Option(help="Of a name on the Hub.")] = "",
    template_arg: Annotated[
        list[str] | None,
        typer.Option(help="KEY=JSON, repeatable: an argument of the template (enable_thinking=false)."),
    ] = None,
    conversations: Annotated[
        Path | None, typer.Option(help="JSON lines to play too: {messages, tools} or a list of messages on each.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Find out whether a tokenizer and its chat template are safe for training on token masks.

    Plays hard conversations turn by turn, and compares what a rollout holds that
    keeps its tokens with what a trainer gets that renders everything anew.

    The exit code is 0 if the template is stable, 1 if it is not, and 2 if it cannot be used or the command is wrong.
    """
    quiet_transformers()
    with report_errors("tokens check", _OF_NO_USE):
        from rollout_server.tokencheck.check import Subject
        from rollout_server.tokencheck.check import check as checked
        from rollout_server.tokencheck.conversation import read_conversations

        arguments = dict(_argument(text) for text in template_arg or ())
        more = [] if conversations is None else read_conversations(conversations)
        files = _read(tokenizer, revision, template)
        report = checked(Subject(files.tokenizer, tokenizer, str(template or "its own"), arguments, files.ends), more)
    _show(report, as_json=as_json)
    raise typer.Exit(_OF_NO_USE if not report.usable else _STABLE if report.stable else _UNSTABLE)


def _show(report: TemplateReport, *, as_json: bool) -> None:
    if as_json:
        from rollout_server.tokencheck.report import report_json

        typer.echo(json.dumps(report_json(report), ensure_ascii=False, indent=2))
        return
    from rich.console import Console

    from rollout_server.tokencheck.terminal import print_report

    print_report(Console(), report)


def _read(name: str, revision: str, template: Path | None) -> TokenizerFiles:
    """Resolves the name as the server does, but a directory may be named too. Raises `RolloutFailed`, OSError and ValueError."""
    from rollout_server.assembly import tokenizer_settings
    from rollout_server.core.spec import TokenizerName
    from rollout_server.edge.tokens.loader import read_tokenizer
    from rollout_server.settings import TOY, load
    from rollout_server.testing.tokenizer import TOY_TOKENIZER

    settings = tokenizer_settings(load())
    directories, templates = dict(settings.directories), dict(settings.templates)
    if name == TOY:
        directories.setdefault(TOY, TOY_TOKENIZER)
    if template is not None:
        template.read_text(encoding="utf-8")  # said here, because the server would speak of its settings
        templates[name] = template
    if name not in directories and name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir():
        raise ValueError(f"there is no directory {name}")
    everything = replace(settings, directories=directories, templates=templates, allow_directories=True)
    return read_tokenizer(TokenizerName(name, revision), everything)


def _argument(text: str) -> tuple[str, JSON]:
    from rollout_server.core.message import MalformedMessage, parse_json

    key, separator, value = text.partition("=")
    if not separator or not key:
        raise ValueError(f"--template-arg {text!r} is not KEY=JSON")
    try:
        return key, parse_json(value)
    except MalformedMessage:
        raise ValueError(f"--template-arg {text!r}: {value!r} is not JSON; a text needs quotes") from None
