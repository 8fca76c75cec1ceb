"""`rollout inspect`: a rollout's transcript, token by token."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollout_server.cli.errors import quiet_transformers, report_errors
from rollout_server.cli.flags import accept_flags, pick_flags

if TYPE_CHECKING:
    from osmosis.rollout.v1.rollout_service_pb2 import Rollout
    from rollout_client import Tls

    from rollout_server.inspection.token_text import Decode

API_KEY = "ROLLOUT_API_KEY"
NEAR = "localhost:50051"


@dataclass(frozen=True, slots=True)
class InspectFlags:
    """What `rollout inspect` takes, as typer reads it."""

    target: Annotated[str, typer.Argument(metavar="UID|FILE", help="A rollout's uid, or a file; -: standard input.")]
    server: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help=f"Ask this server. A uid that is no file asks {NEAR}.")
    ] = None
    segment: Annotated[str | None, typer.Option(help="Show this segment alone.")] = None
    turn: Annotated[int | None, typer.Option(min=1, help="Show this turn alone.")] = None
    logprobs: Annotated[bool, typer.Option("--logprobs", help="Show the logprob of each token of the model.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False
    tokenizer: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=DIRECTORY", help="Repeatable; also ROLLOUT_TOKENIZERS. Without one ids are shown."),
    ] = None
    tls_ca: Annotated[Path | None, typer.Option(help="Authorities of the server's certificate (PEM).")] = None
    tls_certificate: Annotated[Path | None, typer.Option(help="Our certificate (PEM).")] = None
    tls_key: Annotated[Path | None, typer.Option(help="Its private key (PEM).")] = None
    tls_name: Annotated[str, typer.Option(help="The name in the server's certificate, if not the host.")] = ""


@accept_flags(InspectFlags)
def inspect(**values: Any) -> None:
    """Print who wrote which token of a finished rollout.

    Of a running server's, by uid, or of a file: what GET /v1/rollouts/UID?view=full answered, or a Rollout of the contract in
    JSON or binary. An API key is taken from ROLLOUT_API_KEY, never from the command line, which others can read.
    """
    quiet_transformers()
    flags = pick_flags(InspectFlags, values)
    with report_errors("inspect"):
        from rollout_server.inspection.terminal import ViewOptions, print_transcript
        from rollout_server.inspection.text import as_json
        from rollout_server.inspection.transcript import transcript_of

        rollout = _rollout(flags)
        transcript = transcript_of(rollout).select(flags.segment, flags.turn)
        decode = _decode(rollout, flags.tokenizer or []) if rollout.outcome.segments else None
    if flags.as_json:
        typer.echo(json.dumps(as_json(transcript, decode)))
        return
    from rich.console import Console

    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that knows few characters is told of the others
        sys.stdout.reconfigure(errors="backslashreplace")
    print_transcript(Console(), transcript, ViewOptions(decode, flags.logprobs))


def _rollout(flags: InspectFlags) -> Rollout:
    from rollout_server.inspection.load import UID, parse_rollout, read_file

    path = Path(flags.target)
    if flags.server is None and flags.target == "-":
        return parse_rollout(sys.stdin.buffer.read())
    if flags.server is None and path.exists():
        return read_file(path)
    if UID.fullmatch(flags.target) is None:
        raise ValueError(f"{flags.target!r} is no uid, and no such file is here")
    return _fetch(flags)


def _fetch(flags: InspectFlags) -> Rollout:
    from rollout_client import Client, NotFound, Retry, RolloutError

    try:
        with Client(
            flags.server or NEAR, api_key=os.environ.get(API_KEY) or None, tls=_tls(flags), retry=Retry(patience=2)
        ) as client:
            return client.get(flags.target, view="full")
    except NotFound as error:
        where = "" if flags.server else f" at {NEAR}, and no such file is here"
        raise ValueError(f"{error}{where}") from None
    except RolloutError as error:
        hint = f"; set {API_KEY}" if error.code.name == "UNAUTHENTICATED" and not os.environ.get(API_KEY) else ""
        raise ValueError(f"{error}{hint}") from None


def _tls(flags: InspectFlags) -> Tls | None:
    from rollout_client import Tls

    if not (flags.tls_ca or flags.tls_certificate or flags.tls_key or flags.tls_name):
        return None
    return Tls(flags.tls_ca, flags.tls_certificate, flags.tls_key, flags.tls_name)


def _decode(rollout: Rollout, pairs: Sequence[str]) -> Decode | None:
    """The rollout's tokenizer, if it is on this machine. Says on standard error why not."""
    from rollout_server.inspection.escape import visible
    from rollout_server.runtime.errors import RolloutFailed

    directories = _directories(pairs)
    name = rollout.spec.tokenizer.name
    if not name and len(directories) == 1:  # a trainer that renders for itself names none
        name = next(iter(directories))
    if not name:
        typer.echo("token ids are shown: the rollout names no tokenizer; give one with --tokenizer", err=True)
        return None
    try:
        return _load_decode(name, rollout.spec.tokenizer.revision, directories)
    except RolloutFailed as error:
        typer.echo(
            visible(f"token ids are shown, --tokenizer NAME=DIRECTORY would help: {error.failure.message}"), err=True
        )
        return None


def _directories(pairs: Sequence[str]) -> dict[str, Path]:
    split = [pair.partition("=") for pair in pairs]
    if wrong := [pair for pair, (name, _, path) in zip(pairs, split, strict=True) if not name or not path]:
        raise ValueError(f"--tokenizer: {wrong[0]!r} is not NAME=DIRECTORY")
    return {name: Path(path) for name, _, path in split}


def _load_decode(name: str, revision: str, directories: Mapping[str, Path]) -> Decode:
    """Raises `RolloutFailed`. Nothing is fetched; the built-in tokenizer goes by its own name, too, as in `rollout run`."""
    from rollout_server.assembly import tokenizer_settings
    from rollout_server.core.spec import TokenizerName
    from rollout_server.edge.tokens.loader import read_tokenizer
    from rollout_server.settings import TOY, load

    tokenizers = {TOY: Path(TOY), **load().tokenizers, **directories}
    settings = tokenizer_settings(load(tokenizers=tokenizers, tokenizers_offline=True))
    tokenizer = read_tokenizer(TokenizerName(name, revision), settings).tokenizer
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
