"""Calls end when their key is revoked, over gRPC and HTTP; wrong keys are logged by their hash and slowed down."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import pytest
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_server import app
from rollout_server.core.error import Unauthenticated
from rollout_server.edge import api_keys
from rollout_server.edge.api_keys import BURST, DELAY_SECONDS, WrongKeys, entry_of
from rollout_server.edge.rpc.caller import wrong_model_key
from rollout_server.edge.rpc.open_calls import OpenCalls

from tests.keys.test_callers import bearing
from tests.keys.test_keyring import put
from tests.support.agents import Gated
from tests.support.server_client import Caller, serving
from tests.support.start_requests import start

STAYS, GOES = "key-that-stays-0123", "key-that-goes-4567"
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text("\n".join((entry_of("me", STAYS), entry_of("me", GOES))))
    return file


@pytest.fixture
async def server(keys: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Caller]:
    monkeypatch.setattr(app, "KEYS_SECONDS", 0.02)
    async with serving(Gated(), http=True, api_keys_file=keys) as caller:
        yield caller


async def to_the_end(stream: grpc.aio.UnaryStreamCall) -> None:
    while await stream.read() is not grpc.aio.EOF:
        pass


async def test_calls_under_way_end_with_their_key_and_no_others(server: Caller, keys: Path) -> None:
    uid = (await server.stub.StartRollout(start("r"), metadata=bearing(STAYS))).rollout.uid
    watched = pb.WatchRolloutRequest(uid=uid)
    ending = [
        server.stub.WatchRollout(watched, metadata=bearing(GOES)),
        server.stub.RunRollout(pb.RunRolloutRequest(start=start("s")), metadata=bearing(GOES)),
    ]
    staying = server.stub.WatchRollout(watched, metadata=bearing(STAYS))
    for stream in (*ending, staying):
        await stream.read()
    waiting = server.stub.WaitRollout(pb.WaitRolloutRequest(uid=uid), metadata=bearing(GOES))
    put(keys, entry_of("me", STAYS))
    for stream in ending:
        with pytest.raises(grpc.aio.AioRpcError, match="revoked"):
            await to_the_end(stream)
        assert await stream.code() == UNAUTHENTICATED
    assert await waiting.code() == UNAUTHENTICATED
    assert not staying.done()
    await server.stub.CancelRollouts(
        pb.CancelRolloutsRequest(selection=pb.Selection(all=True)), metadata=bearing(STAYS)
    )
    while (item := await staying.read()) is not grpc.aio.EOF:
        last = item.event.WhichOneof("event")
    assert last == "finished"


async def test_a_call_that_is_long_in_ending_holds_up_no_other_check() -> None:
    calls, ending, may_end = OpenCalls(), asyncio.Event(), asyncio.Event()

    def check() -> None:
        raise Unauthenticated("revoked")

    async def slow_to_end() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            await may_end.wait()

    async def called() -> None:
        with calls.entered(check, calls.changes) as call:
            await call.wait(slow_to_end())

    first = asyncio.create_task(called())
    await asyncio.sleep(0)
    calls.end_revoked()
    await ending.wait()
    second = asyncio.create_task(called())
    await asyncio.sleep(0)
    may_end.set()  # `first` processes this later
    calls.end_revoked()
    for task in (first, second):
        with pytest.raises(Unauthenticated, match="revoked"):
            await task


async def test_a_key_that_is_revoked_between_its_check_and_the_request() -> None:
    calls = OpenCalls()
    changes = calls.changes

    def check() -> None:
        raise Unauthenticated("revoked")

    calls.end_revoked()
    with pytest.raises(Unauthenticated, match="revoked"), calls.entered(check, changes):
        pass


async def test_server_sent_events_end_with_their_key(server: Caller, keys: Path) -> None:
    uid = (await server.stub.StartRollout(start("r"), metadata=bearing(STAYS))).rollout.uid
    url = f"http://127.0.0.1:{server.server.http_port}"
    headers = {"authorization": f"Bearer {GOES}"}
    async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as client:
        async with client.stream("GET", f"/v1/rollouts/{uid}/events", headers=headers) as stream:
            lines = stream.aiter_lines()
            async for line in lines:
                if line.startswith("data"):
                    break
            put(keys, entry_of("me", STAYS))
            assert [line async for line in lines if line.startswith("event: finished")] == []
        assert (await client.get(f"/v1/rollouts/{uid}/events", headers=headers)).status_code == 401


async def test_what_fails_once_is_repeated_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    went_on, failures = asyncio.Event(), iter([RuntimeError("once")])

    def refresh_keys() -> None:
        for failure in failures:
            raise failure
        went_on.set()

    task = asyncio.create_task(app._forever(refresh_keys, 0))
    await asyncio.wait_for(went_on.wait(), 60)
    task.cancel()
    assert [record.getMessage() for record in caplog.records] == ["refresh_keys failed; the server retries it in 0 s"]


async def test_wrong_keys_are_logged_by_their_hash_alone(server: Caller, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    url = f"http://127.0.0.1:{server.server.http_port}"
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        for headers in ({"authorization": "Bearer wrong-one"}, {}):
            assert (await client.post("/v1/rollouts", json={}, headers=headers)).status_code == 401
    (record,) = (each for each in caplog.records if each.name == api_keys.__name__)
    assert hashlib.sha256(b"wrong-one").hexdigest()[:12] in record.getMessage()
    assert "wrong-one" not in caplog.text


def test_many_wrong_keys_are_slowed_down_and_logged_together(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    wrong = WrongKeys(lambda: now)
    delays = [wrong.record(f"Bearer {number}", "peer") for number in range(BURST + 500)]
    assert delays == [0.0] * BURST + [DELAY_SECONDS] * 500
    assert len(caplog.records) == BURST
    assert wrong.record(None, "peer") == 0.0
    now += 1000
    assert wrong.record("Bearer later", "peer") == 0.0
    assert "500 more were refused before it" in caplog.records[-1].getMessage()


async def test_the_key_of_a_forgotten_rollout_keeps_no_other_call_open() -> None:
    def forgotten() -> None:
        raise wrong_model_key()

    def revoked() -> None:
        raise Unauthenticated("revoked")

    calls = OpenCalls()
    with calls.entered(forgotten, 0) as first, calls.entered(revoked, 0) as second:
        calls.end_revoked()
        await first.wait(asyncio.sleep(0))
        with pytest.raises(Unauthenticated):
            await second.wait(asyncio.sleep(1))
