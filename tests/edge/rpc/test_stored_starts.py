"""A server with a journal on the disk: starts and cancels that wait for their commit, starts and ends of the server itself."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import grpc
import pytest
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_server import ExternalAgent, Run
from rollout_server.app import Server

from tests.support.agents import Gated, Idle
from tests.support.server_client import Caller, first, refusal, serving, until
from tests.support.start_requests import seconds, settings, start, target


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Let another connection hold the write lock of the journal, so that commits wait, and fail after a second."""
    with closing(sqlite3.connect(directory / "journal.sqlite3", isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


async def test_a_client_of_run_rollout_is_attached_while_its_start_is_stored(tmp_path: Path, gated: Gated) -> None:
    async with serving(gated, journal=str(tmp_path / "j")) as caller:
        request = pb.RunRolloutRequest(start=start("id", cancel_after_detach=seconds(0.0)))
        with locked(tmp_path / "j"):
            stream = caller.stub.RunRollout(request)
            items = asyncio.create_task(first(stream, 2))
            await until(lambda: _is_known(caller))
            await asyncio.sleep(0.1)
        uid = (await items)[0].started.rollout.uid
        gated.gate.set()
        assert (await caller.finished(uid)).outcome.stop.reason == "stop"


async def _is_known(caller: Caller) -> bool:
    listed = await caller.stub.ListRollouts(pb.ListRolloutsRequest(selection=pb.Selection(all=True)))
    return bool(listed.rollouts)


async def test_a_watcher_of_a_start_that_is_refused_gets_the_refusal(tmp_path: Path, gated: Gated) -> None:
    async with serving(gated, journal=str(tmp_path / "j")) as caller:
        with locked(tmp_path / "j"):
            starting = asyncio.create_task(refusal(caller.start(start("id"))))
            await until(lambda: _is_known(caller))
            listed = await caller.stub.ListRollouts(pb.ListRolloutsRequest(selection=pb.Selection(all=True)))
            watching = asyncio.create_task(refusal(caller.events(listed.rollouts[0].uid)))
            for refused in (await starting, await watching):
                assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "JOURNAL_UNAVAILABLE")


async def test_a_cancel_is_answered_once_it_is_stored(tmp_path: Path, gated: Gated) -> None:
    async with serving(gated, journal=str(tmp_path / "j")) as caller:
        uid = (await caller.start(start("id"))).rollout.uid
        cancel = pb.CancelRolloutsRequest(selection=pb.Selection(uids=[uid]), reason="enough")
        with locked(tmp_path / "j"):
            refused = await refusal(caller.stub.CancelRollouts(cancel))
        assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "JOURNAL_UNAVAILABLE")
        await caller.finished(uid)  # which is published after its commit
        with closing(sqlite3.connect(tmp_path / "j" / "journal.sqlite3")) as connection:
            assert connection.execute("SELECT cancelled FROM rollouts").fetchall() == [(b"enough",)]
        assert (await caller.finished(uid)).outcome.cancellation.reason == "enough"


async def test_an_acknowledgement_is_answered_once_it_is_stored(tmp_path: Path) -> None:
    request = start("id", agent="idle")
    request.request_memory = pb.REQUEST_MEMORY_UNTIL_RECEIVED
    async with serving(Idle(), journal=str(tmp_path / "j")) as caller:
        uid = (await caller.start(request)).rollout.uid
        await caller.finished(uid)
        acknowledge = pb.AcknowledgeOutcomeRequest(uid=uid)
        with locked(tmp_path / "j"):
            refused = await refusal(caller.stub.AcknowledgeOutcome(acknowledge))
        assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "JOURNAL_UNAVAILABLE")
        await until(lambda: _is_acknowledged(caller, acknowledge))
        with closing(sqlite3.connect(tmp_path / "j" / "journal.sqlite3")) as connection:
            assert connection.execute("SELECT received FROM rollouts").fetchall() == [(1,)]
        assert not (await caller.start(request)).attached


async def test_a_redelivery_is_answered_once_it_is_stored(tmp_path: Path) -> None:
    async with serving(Idle(), journal=str(tmp_path / "j"), delivery_retries=0) as caller:
        uid = (await caller.start(start("id", agent="idle", outcome=target()))).rollout.uid
        await until(lambda: _is_expired(caller, uid))
        again = pb.RedeliverOutcomesRequest(selection=pb.Selection(uids=[uid]))
        with locked(tmp_path / "j"):
            refused = await refusal(caller.stub.RedeliverOutcomes(again))
        assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "JOURNAL_UNAVAILABLE")


async def _is_expired(caller: Caller, uid: str) -> bool:
    shown = await caller.stub.GetRollout(pb.GetRolloutRequest(uid=uid))
    return bool(shown.rollout.delivery.state == pb.DELIVERY_STATE_EXPIRED)


async def _is_acknowledged(caller: Caller, acknowledge: pb.AcknowledgeOutcomeRequest) -> bool:
    try:
        await caller.stub.AcknowledgeOutcome(acknowledge)
    except grpc.RpcError:
        return False
    return True


class Counted(Idle):
    """Count its runs."""

    runs = 0

    async def play(self, run: Run) -> None:
        self.runs += 1


async def test_a_server_whose_port_is_taken_leaves_its_rollouts_to_the_next_start(tmp_path: Path) -> None:
    gated, counted, changes = Gated(), Counted(), {"journal": str(tmp_path / "j")}
    async with serving(gated, counted, **changes, max_running=1) as caller:
        await caller.start(start("first", agent="gated"))
        uid = (await caller.start(start("second", agent="idle"))).rollout.uid
    async with serving() as other:
        with pytest.raises(OSError, match=str(other.server.grpc_port)):
            await Server([gated, counted], settings(**changes, grpc_port=other.server.grpc_port)).__aenter__()
        assert counted.runs == 0
    async with serving(gated, counted, **changes) as caller:
        assert (await caller.finished(uid)).outcome.stop.reason == "stop"
        assert counted.runs == 1


class Elsewhere(ExternalAgent):
    """Runs elsewhere."""

    name = "elsewhere"


async def test_a_key_is_handed_out_once_it_is_stored(tmp_path: Path) -> None:
    """Also to a second caller, whose request did not create it."""
    async with serving(Elsewhere(), journal=str(tmp_path / "j"), public_url="https://agents.example/") as caller:
        with locked(tmp_path / "j"):
            starting = asyncio.create_task(refusal(caller.start(start("id"))))
            await until(lambda: _is_known(caller))
            listed = await caller.stub.ListRollouts(pb.ListRolloutsRequest(selection=pb.Selection(all=True)))
            request = pb.GetRolloutRequest(uid=listed.rollouts[0].uid, include_access=True)
            both = (refusal(caller.stub.GetRollout(request)) for _ in range(2))
            for refused in (*await asyncio.gather(*both), await starting):
                assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "JOURNAL_UNAVAILABLE")
