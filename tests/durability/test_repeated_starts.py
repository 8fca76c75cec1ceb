"""Starts that are sent again after a restart: the server finds their rollouts also if its settings have changed since."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import grpc
import pytest
from osmosis.journal.v1 import journal_pb2
from osmosis.rollout.v1 import group_pb2

from tests.durability.aims import Aim, Moment
from tests.durability.stage import Stage
from tests.durability.test_groups import request_of
from tests.durability.trials import trial
from tests.support.journal_versions import TO_VERSION_3
from tests.support.server_client import refusal

OTHER_SETTINGS = {"ROLLOUT_MAX_SECONDS": "5000", "ROLLOUT_TIMEOUT_SECONDS": "500", "ROLLOUT_ON_DRIFT": "fail"}


async def test_other_defaults_make_no_other_payload(here: Stage) -> None:
    trials = here.trials()
    here.server.variables |= OTHER_SETTINGS  # from the restart on
    await here.crash_and_check(Aim(Moment.ASKED, trials[0].case.number, 2), trials)


async def test_other_defaults_make_no_other_payload_of_a_group(here: Stage) -> None:
    request = request_of(here, "again", 1, count=2)
    started = await here.server.stub.StartGroup(request)
    here.server.kill()
    here.server.variables |= OTHER_SETTINGS
    await here.server.restart()
    again = await here.server.stub.StartGroup(request)
    assert again.attached
    assert again.group.group_id == started.group.group_id
    await check_refused(here, request)


async def check_refused(here: Stage, request: group_pb2.StartGroupRequest) -> None:
    """The same id with another payload is a conflict."""
    other = group_pb2.StartGroupRequest()
    other.CopyFrom(request)
    other.spec.limits.turns = 77
    refused = await refusal(here.server.stub.StartGroup(other))
    assert (refused.code, refused.reason) == (grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_TAKEN")


@pytest.mark.parametrize("settings", [{}, OTHER_SETTINGS], ids=["the same", "others"])
async def test_fingerprints_of_an_earlier_version_are_compared_with_all_defaults(
    here: Stage, settings: dict[str, str]
) -> None:
    """With other defaults they do not tell whether it was the same request."""
    one, several = here.clients.start_request(trial("grpc", 1, "one")), request_of(here, "several", 1, count=2)
    await here.server.stub.StartRollout(one)
    await here.server.stub.StartGroup(several)
    here.server.kill()
    await here.server.ended()
    write_version_2(here)
    here.server.variables |= settings
    await here.server.restart()
    if settings:
        for refused in (
            await refusal(here.server.stub.StartRollout(one)),
            await refusal(here.server.stub.StartGroup(several)),
        ):
            assert refused.reason == "REQUEST_ID_TAKEN"
    else:
        assert (await here.server.stub.StartRollout(one)).attached
        assert (await here.server.stub.StartGroup(several)).attached
        await check_refused(here, several)


def write_version_2(here: Stage) -> None:
    """Give all starts in the journal the fingerprints of version 2, which had only the second of the two digests."""
    with closing(sqlite3.connect(here.server.journal / "journal.sqlite3")) as connection, connection:
        for statement in TO_VERSION_3:  # without checksums
            connection.execute(statement)
        for number, payload in connection.execute("SELECT number, start FROM rollouts").fetchall():
            start = journal_pb2.AcceptedStart.FromString(payload)
            start.fingerprint = "2:" + start.fingerprint.rpartition(":")[2]
            connection.execute("UPDATE rollouts SET start = ? WHERE number = ?", (start.SerializeToString(), number))
