"""`rollout tokens`: check tokenizers and chat templates for training on token masks."""

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

tokens = typer.Typer(no_args_is_help=True, help="Check tokenizers and chat templates for training on token masks.")

_STABLE, _UNSTABLE, _UNUSABLE = 0, 1, 2


@tokens.callback()
def _tokens() -> None:
    """Keep `check` a subcommand: without a callback, typer makes a single command the group itself."""


@tokens.command()
def check(
    tokenizer: Annotated[
        str, typer.Option(help="Directory, name in ROLLOUT_TOKENIZERS, Hugging Face Hub name, or 'toy'.")
    ],
    template: Annotated[
        Path | None, typer.Option(help="Jinja file with a chat template, instead of the tokenizer's.")
    ] = None,
    revision: Annotated[str, typer.Option(help="Revision on the Hub.")] = "",
    template_arg: Annotated[
        list[str] | None,
        typer.Option(help="Template argument KEY=JSON, repeatable (enable_thinking=false)."),
    ] = None,
    conversations: Annotated[
        Path | None,
        typer.Option(help="JSON Lines with more conversations: {messages, tools} or a list of messages per line."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check whether a chat template keeps the tokens of earlier turns stable.

    Runs difficult conversations turn by turn. After each turn it compares the
    tokens that a rollout has accumulated with a new rendering of the whole
    conversation.

    The exit code is 0 if the template is stable, 1 if it is not, and 2 if it
    cannot be used or the command line is wrong.
    """
    quiet_transformers()
    with report_errors("tokens check", _UNUSABLE):
        from rollout_server.tokencheck.check import Subject
        from rollout_server.tokencheck.check import check as checked
        from rollout_server.tokencheck.conversation import read_conversations

        arguments = dict(_argument(text) for text in template_arg or ())
        more = [] if conversations is None else read_conversations(conversations)
        files = read_files(tokenizer, revision, template)
        report = checked(Subject(files.tokenizer, tokenizer, str(template or "its own"), arguments, files.ends), more)
    _show(report, as_json=as_json)
    raise typer.Exit(_UNUSABLE if not report.usable else _STABLE if report.stable else _UNSTABLE)


def _show(report: TemplateReport, *, as_json: bool) -> None:
    if as_json:
        from rollout_server.tokencheck.report import report_json

        typer.echo(json.dumps(report_json(report), ensure_ascii=False, indent=2))
        return
    from rich.console import Console

    from rollout_server.tokencheck.terminal import print_report

    print_report(Console(), report)


def read_files(name: str, revision: str, template: Path | None) -> TokenizerFiles:
    """Load a tokenizer by name, as the server does, or from a directory. Raises `RolloutFailed`, OSError or ValueError."""
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
        # Fails here if there is no such file. The loader's error would name a setting instead of the flag.
        template.read_text(encoding="utf-8")
        templates[name] = template
    if name not in directories and name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir():
        raise ValueError(f"the directory {name} does not exist")
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
        raise ValueError(f"--template-arg {text!r}: {value!r} is not JSON; a string needs double quotes") from None
