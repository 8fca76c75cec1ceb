"""`rollout verify`: check training samples in files, of any trainer."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from rollout_server.cli.errors import quiet_transformers, report_errors
from rollout_server.cli.json_output import AsJson
from rollout_server.verification.shapes import SampleShape

_FATAL, _UNUSABLE = 1, 2


def verify(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", exists=True, dir_okay=False, help="JSON Lines, JSON or Parquet."),
    ],
    shape: Annotated[
        SampleShape | None, typer.Option(help="Format of the samples. Default: recognised by the keys of each row.")
    ] = None,
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="NAME|DIRECTORY",
            help="Tokenizer of the samples, for more checks: as in `rollout tokens check`, or 'toy'.",
        ),
    ] = "",
    limit: Annotated[int, typer.Option(min=0, help="Most findings that are printed; all are counted.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Check training samples: lengths, masks, logprobs, tokens that train twice.

    Reads samples of this project, of TRL (the dictionary of a rollout_func), of
    verl (AgentLoopOutput), OpenEnv training traces, and other rows with the
    usual names. Needs no server. Files may be larger than the memory.

    The exit code is 0 without fatal findings, 1 with one, and 2 if the command
    line is wrong or a file cannot be opened.
    """
    quiet_transformers()
    with report_errors("verify", _UNUSABLE):
        from rollout_server.cli.author.tokens import read_files
        from rollout_server.verification.token_rules import token_rules
        from rollout_server.verification.verify import SampleVerifier, report_json

        rules = token_rules(tokenizer, read_files(tokenizer, "", None)) if tokenizer else None
        report = SampleVerifier(limit, shape, rules).verify(files)
    if as_json:
        typer.echo(json.dumps(report_json(report)))
    else:
        from rich.console import Console

        from rollout_server.verification.terminal import print_report

        if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may not encode every character
            sys.stdout.reconfigure(errors="backslashreplace")
        print_report(Console(), report)
    raise typer.Exit(0 if report.ok else _FATAL)
