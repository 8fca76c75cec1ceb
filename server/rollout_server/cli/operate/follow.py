"""`rollout start` and `rollout watch`: start a rollout on a running server, and show its events live."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollout_server.cli.connection import ConnectionFlags
from rollout_server.cli.errors import Interrupted, report_errors
from rollout_server.cli.flags import EndpointFlags, accept_flags, pick_flags
from rollout_server.cli.json_output import JsonOutput, event_fields, open_output, rollout_fields
from rollout_server.cli.operate.rollouts import parse_labels, state_name
from rollout_server.cli.prompt_flags import PromptFlags

if TYPE_CHECKING:
    from rich.console import Console
    from rollout_client import Client, Outcome, Rollout

    from rollout_server.authoring.endpoint import Endpoint


@dataclass(frozen=True, slots=True)
class WatchFlags:
    """Arguments and flags of `rollout watch`, without those of the connection."""

    uid: Annotated[str, typer.Argument(metavar="UID", help="Uid of the rollout, as `rollout ps` lists it.")]
    after: Annotated[int, typer.Option(min=0, metavar="N", help="Show the events after this sequence number.")] = 0
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line: the events.")] = False


@accept_flags(WatchFlags, ConnectionFlags)
def watch(**values: Any) -> None:
    """Show the turns, tool calls and tool results of a rollout live, until it finishes.

    The exit code is 0 if the rollout completed, else 1. Ctrl-C stops watching, and
    the rollout continues, unless it was started with cancel_after_detach.

    With --json each line is an event as in GET /v1/rollouts/UID/events. The last
    one is "finished", with the outcome.
    """
    flags = pick_flags(WatchFlags, values)
    connection = pick_flags(ConnectionFlags, values)
    with report_errors("watch"), open_output(as_json=flags.as_json) as output, connection.connect() as client:
        completed = _follow(client, flags.uid, flags.after, output)
    raise typer.Exit(0 if completed else 1)


@dataclass(frozen=True, slots=True)
class StartFlags:
    """Flags of `rollout start`, without those of the prompt, the endpoint and the connection."""

    completions: Annotated[
        str, typer.Option(metavar="URL", help="Endpoint that generates completions. The server calls it.")
    ]
    agent: Annotated[str, typer.Option(metavar="NAME", help="Agent to run. Default: the server's default agent.")] = ""
    label: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Label, for selecting rollouts; repeatable.")
    ] = None
    follow: Annotated[bool, typer.Option("--watch", help="Follow the rollout as `rollout watch` does.")] = False
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line: the rollout, with --watch also its events.")
    ] = False


@accept_flags(StartFlags, PromptFlags, EndpointFlags, ConnectionFlags)
def start(**values: Any) -> None:
    """Start a rollout on a running server and print its uid.

    The rollout continues when this command ends. With --watch the command follows
    it, and the exit code is that of `rollout watch`.

    With --json the first line is the rollout as in GET /v1/rollouts/UID. With
    --watch the further lines are those of `rollout watch --json`.
    """
    flags, prompt = pick_flags(StartFlags, values), pick_flags(PromptFlags, values)
    labels = parse_labels(flags.label or [])
    with report_errors("start"), open_output(as_json=flags.as_json) as output:
        fields = _endpoint(flags.completions, pick_flags(EndpointFlags, values)).start_fields()
        fields["messages"], fields["metadata"] = prompt.read_messages(), prompt.read_metadata() or None
        fields["agent"], fields["labels"] = flags.agent or None, labels or None
        with pick_flags(ConnectionFlags, values).connect() as client:
            rollout = client.start(**fields).rollout
            output.line(rollout_fields(rollout))
            if not flags.as_json:
                typer.echo(rollout.uid)
            completed = not flags.follow or _follow(client, rollout.uid, 0, output)
    raise typer.Exit(0 if completed else 1)


def _endpoint(url: str, flags: EndpointFlags) -> Endpoint:
    from rollout_server.authoring.author_traceback import AuthorError

    if flags.tokenizers:
        raise AuthorError("--tokenizer NAME: the server finds the tokenizer by its name; leave out the directory")
    return flags.endpoint_at(url, "--completions")


def _follow(client: Client, uid: str, after: int, output: JsonOutput) -> bool:
    """Print the events of a rollout until it finishes. Return whether it completed."""
    from rich.console import Console

    from rollout_server.authoring.rollout_result import result_of
    from rollout_server.cli.progress import show_result

    console = Console(highlight=False)
    rollout = client.get(uid, view="messages")
    try:
        outcome = _print_events(client, rollout, after, output, console)
    except KeyboardInterrupt:
        raise Interrupted(f"stopped watching; {_what_follows(rollout)}") from None
    # The result is shown without names of tools, so one entry stands for all of them.
    result = result_of(rollout.spec.rollout_id, uid, outcome, {"tools": outcome.metrics.tool_failures})
    show_result(console, result, authors={})
    return result.finished


def _print_events(client: Client, rollout: Rollout, after: int, output: JsonOutput, console: Console) -> Outcome:
    from rollout_server.cli.progress import Progress, parse_message
    from rollout_server.core.limits import Limits
    from rollout_server.inspection.escape import visible

    spec = rollout.spec
    title = f"rollout {rollout.uid}, agent {spec.agent}, {state_name(rollout)}"
    console.print(visible(title), markup=False, soft_wrap=True)
    # Not the time limit: it counts from the first turn, and the status line from the start of the rollout.
    progress = Progress(console, Limits(spec.limits.turns or None, spec.limits.generated_tokens or None))
    if not after:
        progress.messages([parse_message(message) for message in spec.messages])
    age = max(time.time() - rollout.create_time.ToNanoseconds() / 1e9, 0)
    with client.watch(rollout.uid, after_sequence=after, detail="messages") as events, progress.live(age):
        for event in events:
            progress.show(event)
            output.line(event_fields(event))
    # Without an event after the last one of a finished rollout, the stream has no outcome.
    return client.get(rollout.uid).outcome if events.outcome is None else events.outcome


def _what_follows(rollout: Rollout) -> str:
    """Return what becomes of a rollout that nobody watches any more."""
    if not rollout.spec.HasField("cancel_after_detach"):
        return "the rollout continues"
    seconds = rollout.spec.cancel_after_detach.ToNanoseconds() / 1e9
    return f"unless another client watches it, the server cancels the rollout after {seconds:g} s (cancel_after_detach)"
