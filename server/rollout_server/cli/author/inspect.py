"""`rollout inspect`: the transcript of a rollout, token by token."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollout_server.cli.connection import NEAR, ConnectionFlags
from rollout_server.cli.errors import quiet_transformers, report_errors
from rollout_server.cli.flags import accept_flags, pick_flags, tokenizer_directories

if TYPE_CHECKING:
    from osmosis.rollout.v1.rollout_service_pb2 import Rollout
    from rollout_client import Client

    from rollout_server.edge.tokens.token_text import Decode


@dataclass(frozen=True, slots=True)
class InspectFlags:
    """Arguments and flags of `rollout inspect`, without those of the connection."""

    target: Annotated[
        str, typer.Argument(metavar="UID|FILE", help="Uid of a rollout, or a file; - reads standard input.")
    ]
    segment: Annotated[str | None, typer.Option(help="Show only this segment.")] = None
    turn: Annotated[int | None, typer.Option(min=1, help="Show only this turn.")] = None
    logprobs: Annotated[bool, typer.Option("--logprobs", help="Show the logprob of each generated token.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False
    tokenizer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=DIRECTORY",
            help="Tokenizer to decode tokens, repeatable; also ROLLOUT_TOKENIZERS.",
        ),
    ] = None


@accept_flags(InspectFlags, ConnectionFlags)
def inspect(**values: Any) -> None:
    """Show the tokens of a rollout, finished or running, with author, mask and drift.

    The rollout is read from a running server by its uid, or from a file: the
    response to GET /v1/rollouts/UID?view=full, a file of `rollout run --out`,
    or a protobuf Rollout or Outcome in JSON or binary.

    The API key is read from the environment variable ROLLOUT_API_KEY. It is no
    flag, because other users of the machine can read command lines.
    """
    quiet_transformers()
    flags = pick_flags(InspectFlags, values)
    with report_errors("inspect"):
        from rollout_server.inspection.terminal import ViewOptions, print_transcript
        from rollout_server.inspection.text import as_json
        from rollout_server.inspection.transcript import transcript_of

        rollout = _rollout(flags.target, pick_flags(ConnectionFlags, values))
        transcript = transcript_of(rollout).select(flags.segment, flags.turn)
        decode = _decode(rollout, flags.tokenizer or []) if rollout.outcome.segments else None
    if flags.as_json:
        typer.echo(json.dumps(as_json(transcript, decode)))
        return
    from rich.console import Console

    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may not encode every character
        sys.stdout.reconfigure(errors="backslashreplace")
    print_transcript(Console(), transcript, ViewOptions(decode, flags.logprobs))


def _rollout(target: str, connection: ConnectionFlags) -> Rollout:
    from rollout_server.inspection.load import UID, parse_rollout, read_file

    path = Path(target)
    if connection.server is None and target == "-":
        return parse_rollout(sys.stdin.buffer.read())
    if connection.server is None and path.exists():
        return read_file(path)
    if UID.fullmatch(target) is None:
        raise ValueError(f"{target!r} is not a uid, and no such file exists")
    with connection.connect() as client:
        return _fetch(client, target, "" if connection.server else f" at {NEAR}, and no such file exists")


def _fetch(client: Client, uid: str, where: str) -> Rollout:
    """Return a rollout with its tokens. `where` follows the error text if there is no such rollout."""
    from rollout_client import NotFound

    from rollout_server.inspection.so_far import add_outcome_so_far

    try:
        rollout = client.get(uid, view="full")
    except NotFound as error:
        raise ValueError(f"{error}{where}") from None
    if not rollout.HasField("outcome"):
        # This attaches a client for a moment, which restarts the time of cancel_after_detach.
        with client.watch(uid, detail="full") as events:
            add_outcome_so_far(rollout, events)
    return rollout


def _decode(rollout: Rollout, pairs: Sequence[str]) -> Decode | None:
    """Return the decoder of the rollout's tokenizer, or None, with a message on standard error, if it is not installed here."""
    from rollout_server.inspection.escape import visible
    from rollout_server.runtime.errors import RolloutFailed

    directories = tokenizer_directories(pairs)
    name = rollout.spec.tokenizer.name
    if not name and len(directories) == 1:  # rollouts whose trainer renders the prompts may name no tokenizer
        name = next(iter(directories))
    if not name:
        typer.echo(
            "token ids are shown: the rollout names no tokenizer; pass one with --tokenizer NAME=DIRECTORY", err=True
        )
        return None
    try:
        return _load_decode(name, rollout.spec.tokenizer.revision, directories)
    except RolloutFailed as error:
        typer.echo(visible(f"token ids are shown: {error.failure.message}; pass --tokenizer NAME=DIRECTORY"), err=True)
        return None


def _load_decode(name: str, revision: str, directories: Mapping[str, Path]) -> Decode:
    """Load a tokenizer from local files. Raises `RolloutFailed` if there is none.

    The name `toy` means the built-in tokenizer, as in `rollout run`. Nothing is downloaded.
    """
    from rollout_server.assembly import tokenizer_settings
    from rollout_server.core.spec import TokenizerName
    from rollout_server.edge.tokens.loader import read_tokenizer
    from rollout_server.settings import TOY, load

    tokenizers = {TOY: Path(TOY), **load().tokenizers, **directories}
    settings = tokenizer_settings(load(tokenizers=tokenizers, tokenizers_offline=True))
    tokenizer = read_tokenizer(TokenizerName(name, revision), settings).tokenizer
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
