"""`rollout ps` and `rollout cancel`: the rollouts of a running server."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollout_server.cli.connection import ConnectionFlags
from rollout_server.cli.errors import report_errors
from rollout_server.cli.flags import accept_flags, pick_flags
from rollout_server.cli.json_output import AsJson, basic_fields, open_output

if TYPE_CHECKING:
    from rollout_client import Rollout, SelectionFields

_PAGE = 1000
_COLUMNS = ("UID", "ROLLOUT ID", "AGENT", "STATE", "TURNS", "TOKENS", "AGE", "RESULT")
_UNITS = (("d", 86400), ("h", 3600), ("m", 60))


class StateChoice(StrEnum):
    """States of a rollout, as `--state` takes them."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class SelectionFlags:
    """Conditions that select rollouts; a rollout must meet all of them."""

    state: Annotated[
        list[StateChoice] | None, typer.Option(help="Only rollouts in this state; repeatable for several states.")
    ] = None
    agent: Annotated[str, typer.Option(metavar="NAME", help="Only rollouts of this agent.")] = ""
    group: Annotated[str, typer.Option(metavar="ID", help="Only rollouts of this group.")] = ""
    label: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Only rollouts with this label; repeatable.")
    ] = None

    def selection(self) -> SelectionFields:
        """Return the conditions as the client takes them; empty without any flag."""
        fields: SelectionFields = {}
        if self.state:
            fields["states"] = [each.value for each in self.state]
        if self.agent:
            fields["agent"] = self.agent
        if self.group:
            fields["group_id"] = self.group
        if self.label:
            fields["labels"] = parse_labels(self.label)
        return fields


def parse_labels(pairs: Sequence[str]) -> dict[str, str]:
    """Return labels that were given as KEY=VALUE. Raises `typer.BadParameter` for another form, and for a key with two values."""
    labels: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"{pair!r} is not KEY=VALUE", param_hint="--label")
        if labels.setdefault(key, value) != value:
            raise typer.BadParameter(f"{key!r} has two values; a label has one", param_hint="--label")
    return labels


def state_name(rollout: Rollout) -> str:
    """Return the state's name in the REST API: "queued", "running" or "finished"."""
    from osmosis.rollout.v1.rollout_service_pb2 import RolloutState

    return RolloutState.Name(rollout.state).removeprefix("ROLLOUT_STATE_").lower()


@dataclass(frozen=True, slots=True)
class PsFlags:
    """Flags of `rollout ps`, without those of the selection and the connection."""

    limit: Annotated[int, typer.Option(min=1, help="Show at most this many rollouts.")] = 50
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line: the rollouts.")] = False


@accept_flags(PsFlags, SelectionFlags, ConnectionFlags)
def ps(**values: Any) -> None:
    """List the rollouts of a running server, the newest first.

    The columns are the rollout's uid and rollout id, agent and state, the turns
    and generated tokens so far, the time since it was accepted, and the result:
    the reward or the reason for which it ended.

    With --json each line is a rollout as in GET /v1/rollouts.
    """
    flags, selection = pick_flags(PsFlags, values), pick_flags(SelectionFlags, values).selection()
    with report_errors("ps"), open_output(as_json=flags.as_json) as output:
        with pick_flags(ConnectionFlags, values).connect() as client:
            listed = client.list(page_size=min(flags.limit + 1, _PAGE), **selection)
            found = list(itertools.islice(listed, flags.limit + 1))
        for rollout in found[: flags.limit]:
            output.line(basic_fields(rollout))
        if not flags.as_json:
            now = time.time()
            print_table(_COLUMNS, [_row(rollout, now) for rollout in found[: flags.limit]])
        if len(found) > flags.limit:
            typer.echo(f"there are more than {flags.limit}: raise --limit, or select with --state or --agent", err=True)


@dataclass(frozen=True, slots=True)
class CancelFlags:
    """Arguments and flags of `rollout cancel`, without those of the selection and the connection."""

    uids: Annotated[list[str] | None, typer.Argument(metavar="UID", help="Uids, as `rollout ps` lists them.")] = None
    everything: Annotated[bool, typer.Option("--all", help="Select all rollouts that your API key may cancel.")] = False
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Reason in the outcomes; up to 1,000 characters.")] = ""
    as_json: AsJson = False


@accept_flags(CancelFlags, SelectionFlags, ConnectionFlags)
def cancel(**values: Any) -> None:
    """Cancel rollouts of a running server and print the uids of those that had not finished.

    Name uids, or select with flags, or use --all. With several of them, a rollout
    must meet all. Each cancelled rollout ends with an outcome that keeps what was
    recorded until then. Finished rollouts do not change.

    With --json the output is {"uids": [...]}, as of POST /v1/rollouts/cancel.
    """
    flags, selection = pick_flags(CancelFlags, values), pick_flags(SelectionFlags, values).selection()
    if flags.uids:
        selection["uids"] = flags.uids
    if flags.everything:
        selection["all"] = True
    if not selection:
        text = "nothing is selected; name uids, use --state, --agent, --group or --label, or --all for all rollouts"
        raise typer.BadParameter(text, param_hint="UID")
    with report_errors("cancel"), open_output(as_json=flags.as_json) as output:
        with pick_flags(ConnectionFlags, values).connect() as client:
            uids = client.cancel(reason=flags.reason, **selection)
        output.write({"uids": list(uids)})
        for uid in uids if not flags.as_json else ():
            typer.echo(uid)
        if not uids:
            typer.echo("no rollout was cancelled: none that was selected is queued or running", err=True)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows below the names of their columns. Control characters of the values are escaped."""
    from rollout_server.inspection.escape import visible

    table = [columns, *(tuple(map(visible, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        typer.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _row(rollout: Rollout, now: float) -> tuple[str, ...]:
    return (
        rollout.uid,
        rollout.spec.rollout_id,
        rollout.spec.agent,
        state_name(rollout),
        str(rollout.metrics.turns),
        str(rollout.metrics.generated_tokens),
        time_span(now - rollout.create_time.ToNanoseconds() / 1e9),
        result_text(rollout),
    )


def time_span(seconds: float) -> str:
    """Return a time span in the largest unit that fits, such as "5m"; a negative one as "0s"."""
    unit, size = next((each for each in _UNITS if seconds >= each[1]), ("s", 1))
    return f"{max(seconds, 0) // size:.0f}{unit}"


def result_text(rollout: Rollout) -> str:
    """Return the reward of a rollout, or why it ended. A rollout that has not finished has none."""
    from rollout_client.samples import category_of

    outcome = rollout.outcome
    match outcome.WhichOneof("end"):
        case "failure":
            return f"failed: {category_of(outcome.failure)}"
        case "cancellation":
            return f"cancelled: {outcome.cancellation.reason}"
        case "stop" if outcome.HasField("reward"):
            return f"reward {outcome.reward:g}"
        case _:
            return outcome.stop.reason
