"""`rollout deliveries` beside a running server, with a receiver that fails and then works."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import pytest
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from typer.testing import Result

from tests.cli.conftest import Invoke, complaint, document
from tests.edge.outcome.test_through_the_server import asked, settled, world
from tests.support.outcome_receiver import Answer
from tests.support.server_client import Caller, until

NO = Answer(grpc.StatusCode.INVALID_ARGUMENT, "not\x1b[2Jready")
DOWN = Answer(grpc.StatusCode.UNAVAILABLE, "busy")


async def run(invoke: Invoke, caller: Caller, *arguments: str) -> Result:
    """Run `rollout deliveries` in a thread."""
    return await asyncio.to_thread(invoke, "deliveries", *arguments, "--server", caller.address)


def listed(told: Result) -> list[Any]:
    """The JSON objects on standard output."""
    assert (told.exit_code, told.stderr) == (0, "")
    return [json.loads(line) for line in told.stdout.splitlines()]


async def test_refused_outcomes_are_listed_and_sent_again(invoke: Invoke) -> None:
    async with world(NO, NO, NO, NO, Answer()) as (caller, trainer, receiver):
        uids = []
        for name in ("first", "second", "third"):
            uids.append((await caller.start(asked(trainer, receiver.url, rollout_id=name))).rollout.uid)
            await settled(caller, uids[-1])
        first, second, third = uids
        told = await run(invoke, caller)
        assert (told.exit_code, told.stderr) == (0, "")
        head, *rows = told.stdout.splitlines()
        assert head.split() == [
            *("UID", "ROLLOUT", "ID", "RECEIVER", "STATE", "ATTEMPTS", "NEXT", "ENDED", "LAST", "ERROR"),
        ]
        assert [row.split()[:5] for row in rows] == [
            [uid, name, receiver.url, "refused", "1"]
            for uid, name in ((third, "third"), (second, "second"), (first, "first"))
        ]
        assert all("s ago" in row and "ready" in row and "\x1b" not in row for row in rows)
        found = listed(await run(invoke, caller, first, "--json"))
        assert [(each["uid"], each["delivery"]["state"]) for each in found] == [(first, "refused")]
        assert listed(await run(invoke, caller, "--state", "expired", "--json")) == []
        assert "more than 2" in (await run(invoke, caller, "--limit", "2")).stderr

        told = await run(invoke, caller, "--resend", second)
        assert (told.exit_code, told.stdout) == (0, f"{second}\n")
        assert (await settled(caller, second)).delivery.state == pb.DELIVERY_STATE_REFUSED
        told = await run(invoke, caller, "--resend-all", "--state", "expired")
        assert (told.exit_code, told.stdout) == (0, "")
        assert "no outcome is sent again" in told.stderr
        told = await run(invoke, caller, "--resend-all", "--json")
        assert (told.exit_code, document(told)) == (0, {"uids": [third, second, first]})
        for uid in uids:
            assert (await settled(caller, uid)).delivery.state == pb.DELIVERY_STATE_ACKNOWLEDGED
        assert listed(await run(invoke, caller, "--json")) == []


async def test_a_pending_one_is_listed_with_its_next_attempt_and_tried_at_once(invoke: Invoke) -> None:
    async with world(DOWN, Answer(), retry_base_seconds=1000, retry_max_seconds=1000) as (caller, trainer, receiver):
        uid = (await caller.start(asked(trainer, receiver.url))).rollout.uid

        async def waits() -> bool:
            return (await caller.get(uid)).delivery.HasField("next_attempt_time")

        await until(waits)
        told = await run(invoke, caller, "--state", "pending")
        row = told.stdout.splitlines()[1]
        assert row.split()[:4] == [uid, "r", receiver.url, "pending"]
        assert "  in " in row
        assert "busy" in row
        assert (await run(invoke, caller, "--resend", uid)).stdout == f"{uid}\n"
        assert (await settled(caller, uid)).delivery.state == pb.DELIVERY_STATE_ACKNOWLEDGED


async def test_a_uid_that_does_not_exist_sends_nothing(invoke: Invoke) -> None:
    async with world() as (caller, _, _receiver):
        told = await run(invoke, caller, "--resend", "nowhere-1")
        assert told.exit_code == 1
        assert "nowhere-1" in complaint(told)


@pytest.mark.parametrize("arguments", [("--resend",), ("--resend-all", "u1"), ("--state", "acknowledged")])
def test_a_wrong_combination_is_a_wrong_command_line(invoke: Invoke, arguments: tuple[str, ...]) -> None:
    told = invoke("deliveries", *arguments, "--json")
    assert (told.exit_code, document(told)["error"]["kind"]) == (2, "usage")
