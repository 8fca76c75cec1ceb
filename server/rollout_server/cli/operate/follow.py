"""`rollout start` and `rollout watch`: start a rollout on a running server, and show its events live."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollout_server.cli.connection import ConnectionFlags
from rollout_server.cli.errors import Interrupted, report_errors
from rollout_server.cli.flags import EndpointFlags, accept_flags, pick_flags
from rollout_server.cli.json_output import JsonOutput, basic_fields, event_fields, open_output
from rollout_server.cli.operate.rollouts import parse_labels, result_text, state_name
from rollout_server.cli.prompt_flags import PromptFlags

if TYPE_CHECKING:
    from rich.console import Console
    from rollout_client import Client, Outcome, Rollout, StartFields

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

    The exit code is 0 if the rollout completed, else 1. Ctrl-C stops watching,
    and the rollout continues, unless it was started with cancel_after_detach.

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
    group: Annotated[
        int | None, typer.Option(min=1, max=1024, metavar="N", help="Start a group of N rollouts, all or none.")
    ] = None
    min_usable: Annotated[
        int, typer.Option(min=0, metavar="N", help="With --group: cancel the others once N are usable.")
    ] = 0
    refill: Annotated[
        int, typer.Option(min=0, max=1024, metavar="N", help="With --group: start up to N failed rollouts anew.")
    ] = 0
    follow: Annotated[bool, typer.Option("--watch", help="Follow the rollout as `rollout watch` does.")] = False
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line: the rollout, with --watch also its events.")
    ] = False


@accept_flags(StartFlags, PromptFlags, EndpointFlags, ConnectionFlags)
def start(**values: Any) -> None:
    """Start a rollout on a running server and print its uid.

    If the agent runs elsewhere, stderr has the base URL and the key of its model
    endpoint, and with --json the field "access". For the rollouts of a group,
    POST /v1/rollouts/UID/access returns them.

    The rollout continues when this command ends. With --watch the command follows
    it, and the exit code is that of `rollout watch`.

    With --group N it starts N rollouts of the prompt and prints the id of the
    group, for `rollout ps --group ID` and `rollout cancel --group ID`. With
    --watch it prints each rollout as it ends, and exits with 0 if enough are
    usable: as many as --min-usable says, else all.

    With --json the first line is the rollout as in GET /v1/rollouts/UID. With
    --watch the further lines are those of `rollout watch --json`. For a group
    they are as in GET /v1/groups/ID and GET /v1/groups/ID/events.
    """
    flags, prompt = pick_flags(StartFlags, values), pick_flags(PromptFlags, values)
    labels = parse_labels(flags.label or [])
    if flags.group is None and (flags.min_usable or flags.refill):
        raise typer.BadParameter("give --group N as well", param_hint="--min-usable, --refill")
    with report_errors("start"), open_output(as_json=flags.as_json) as output:
        fields = _endpoint(flags.completions, pick_flags(EndpointFlags, values)).start_fields()
        fields["messages"], fields["metadata"] = prompt.read_messages(), prompt.read_metadata() or None
        fields["agent"], fields["labels"] = flags.agent or None, labels or None
        with pick_flags(ConnectionFlags, values).connect() as client:
            completed = (_start_one if flags.group is None else _start_group)(client, flags, fields, output)
    raise typer.Exit(0 if completed else 1)


def _start_one(client: Client, flags: StartFlags, fields: StartFields, output: JsonOutput) -> bool:
    """Start a rollout. Return whether it completed; True if it is not followed."""
    started = client.start(**fields)
    rollout, access = started.rollout, started.access
    shown = {} if access is None else {"access": {"base_url": access.base_url, "key": access.key}}
    output.line({**basic_fields(rollout), **shown})
    if not flags.as_json:
        typer.echo(rollout.uid)
    if not flags.as_json and access is not None:
        # On stderr: stdout has the uid only, for scripts.
        typer.echo(f"The agent's model endpoint: base URL {access.base_url}, key {access.key}", err=True)
    return not flags.follow or _follow(client, rollout.uid, 0, output)


def _start_group(client: Client, flags: StartFlags, fields: StartFields, output: JsonOutput) -> bool:
    """Start a group. Return whether enough of its rollouts are usable; True if it is not followed."""
    count = flags.group or 0
    started = client.start_group(count, min_usable=flags.min_usable, refill=flags.refill, **fields)
    output.line(basic_fields(started.group))
    if not flags.as_json:
        typer.echo(started.group_id)
    if not flags.follow:
        return True
    try:
        return _print_outcomes(client, started.group_id, output) >= (flags.min_usable or count)
    except KeyboardInterrupt:
        raise Interrupted("stopped watching; the group continues") from None


def _print_outcomes(client: Client, group_id: str, output: JsonOutput) -> int:
    """Print the rollouts of a group as they end, and its result. Return the number of usable ones."""
    from rich.console import Console

    from rollout_server.inspection.escape import visible

    console = Console(highlight=False)
    with client.watch_group(group_id) as outcomes:
        for outcome in outcomes:
            output.line({"sequence": outcomes.last_sequence, "event": "outcome", **basic_fields(outcome)})
            note = "; started anew" if outcome.replaced else ""
            text = f"rollout {outcome.index}  {outcome.rollout.uid}  {result_text(outcome.rollout)}{note}"
            console.print(visible(text), markup=False, soft_wrap=True)
    result = outcomes.result or client.get_group(group_id).result
    output.line({"sequence": outcomes.last_sequence, "event": "result", **basic_fields(result)})
    counts = f"{result.completed} completed, {result.failed} failed, {result.cancelled} cancelled"
    early = "; stopped early" if result.early_stop else ""
    text = f"{result.usable} of {result.asked} rollouts are usable: {counts}; {result.refilled} started anew{early}"
    console.print(text, markup=False, soft_wrap=True)
    return result.usable


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
