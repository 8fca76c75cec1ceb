"""`rollout deliveries`: the outcomes of a running server that were not acknowledged, and sending them again."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollout_server.cli.connection import ConnectionFlags
from rollout_server.cli.errors import report_errors
from rollout_server.cli.flags import accept_flags, pick_flags
from rollout_server.cli.json_output import JsonOutput, basic_fields, open_output
from rollout_server.cli.operate.rollouts import print_table, time_span

if TYPE_CHECKING:
    from rollout_client import Client, Rollout, SelectionFields

_PAGE = 1000
_COLUMNS = ("UID", "ROLLOUT ID", "RECEIVER", "STATE", "ATTEMPTS", "NEXT", "ENDED", "LAST ERROR")


class DeliveryChoice(StrEnum):
    """States of a delivery that is not acknowledged, as `--state` takes them."""

    PENDING = "pending"
    REFUSED = "refused"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class DeliveriesFlags:
    """Arguments and flags of `rollout deliveries`, without those of the connection."""

    uids: Annotated[
        list[str] | None, typer.Argument(metavar="UID", help="Uids of rollouts. Default: all of your rollouts.")
    ] = None
    state: Annotated[
        list[DeliveryChoice] | None,
        typer.Option(help="Only deliveries in this state; repeatable for several states."),
    ] = None
    resend: Annotated[bool, typer.Option("--resend", help="Send the outcomes of the named rollouts again.")] = False
    resend_all: Annotated[
        bool, typer.Option("--resend-all", help="Send all outcomes again that this command lists without it.")
    ] = False
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many deliveries.")] = 50
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line: the rollouts. With --resend: one object.")
    ] = False

    def selection(self) -> SelectionFields:
        """Return the rollouts as the client selects them."""
        states = self.state or list(DeliveryChoice)
        fields: SelectionFields = {"delivery_states": [each.value for each in states]}
        if self.uids:
            fields["uids"] = self.uids
        return fields


@accept_flags(DeliveriesFlags, ConnectionFlags)
def deliveries(**values: Any) -> None:
    """List the outcomes of a running server that their receivers have not acknowledged, or send them again.

    The columns are the rollout's uid and rollout id, the receiver, the state, the
    attempts so far, the time until the next one or since the delivery was given
    up, and the last error. A pending delivery is retried by the server; one that
    was refused or has expired is sent again only with --resend or --resend-all.

    Every attempt sends the same bytes under the same key, so a receiver that
    remembers keys processes each outcome once. Acknowledged outcomes are never
    sent again. The server forgets finished rollouts after a while.

    With --json each line is a rollout as in GET /v1/rollouts; with --resend or
    --resend-all the output is {"uids": [...]}.
    """
    flags = pick_flags(DeliveriesFlags, values)
    if flags.resend and not flags.uids:
        raise typer.BadParameter("no rollout is named; name uids, or use --resend-all", param_hint="--resend")
    if flags.resend_all and flags.uids:
        raise typer.BadParameter("is for all rollouts; with uids use --resend", param_hint="--resend-all")
    act = _resend if flags.resend or flags.resend_all else _list
    connection = pick_flags(ConnectionFlags, values)
    with (
        report_errors("deliveries"),
        open_output(as_json=flags.as_json) as output,
        connection.connect() as client,
    ):
        act(client, flags, output)


def _list(client: Client, flags: DeliveriesFlags, output: JsonOutput) -> None:
    listed = client.list(page_size=min(flags.limit + 1, _PAGE), **flags.selection())
    found = list(itertools.islice(listed, flags.limit + 1))
    for rollout in found[: flags.limit]:
        output.line(basic_fields(rollout))
    if not output.as_json:
        now = time.time()
        print_table(_COLUMNS, [_row(rollout, now) for rollout in found[: flags.limit]])
    if len(found) > flags.limit:
        typer.echo(f"there are more than {flags.limit}: raise --limit, or select with --state", err=True)


def _resend(client: Client, flags: DeliveriesFlags, output: JsonOutput) -> None:
    uids = client.redeliver(**flags.selection())
    output.write({"uids": list(uids)})
    for uid in uids if not output.as_json else ():
        typer.echo(uid)
    if not uids:
        typer.echo("no outcome is sent again: none that was selected is pending, refused or expired", err=True)


def _row(rollout: Rollout, now: float) -> tuple[str, ...]:
    from osmosis.rollout.v1.rollout_service_pb2 import DeliveryState

    delivery = rollout.delivery
    upcoming = delivery.next_attempt_time.ToNanoseconds() / 1e9 - now
    ended = now - delivery.end_time.ToNanoseconds() / 1e9
    return (
        rollout.uid,
        rollout.spec.rollout_id,
        rollout.spec.outcome.url,
        DeliveryState.Name(delivery.state).removeprefix("DELIVERY_STATE_").lower(),
        str(delivery.attempts),
        f"in {time_span(upcoming)}" if delivery.HasField("next_attempt_time") else "",
        f"{time_span(ended)} ago" if delivery.HasField("end_time") else "",
        delivery.error,
    )
