"""Malicious or vanished clients, and what they leave behind in the server."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import grpc
import pytest
from osmosis.rollout.v1 import outcome_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_server.app import Server

from tests.support.agents import Gated, Idle
from tests.support.server_client import CHANNEL_OPTIONS, DETAILS, Caller, first, refusal, settled, until
from tests.support.start_requests import metadata, seconds, settings, start
from tests.support.tcp_proxy import TcpProxy

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
GARBAGE = {
    "nothing": b"",
    "noise": random.Random(1).randbytes(20_000),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "preface": PREFACE,
    "preface and noise": PREFACE + random.Random(2).randbytes(20_000),
    "half a frame": PREFACE + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + b"\x00\x40\x00\x01\x04\x00\x00\x00\x01",
    "a frame too long": PREFACE + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + bytes(1000),
}


async def warm(caller: Caller) -> int:
    """The number of tasks after one finished call, with nothing in progress."""
    await caller.stub.GetServerInfo(pb.GetServerInfoRequest())
    await asyncio.sleep(0.05)
    return len(asyncio.all_tasks())


@pytest.mark.parametrize("name", GARBAGE)
async def test_garbage_on_the_port_disturbs_nobody(caller: Caller, name: str) -> None:
    await warm(caller)
    for _ in range(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", caller.server.grpc_port)
        with contextlib.suppress(OSError, TimeoutError):
            writer.write(GARBAGE[name])
            writer.write_eof()
            await asyncio.wait_for(reader.read(), 0.05)
        writer.transport.abort()
    assert (await caller.play(start())).outcome.stop.reason == "stop"


@pytest.mark.parametrize("payload", [b"\xff\xff\xff\xff", b"\x0a\x02\xff\xfe", b"\x0a\xff\xff\xff\xff\x0f"])
async def test_a_payload_that_is_no_message_is_refused(caller: Caller, payload: bytes) -> None:
    for method in ("GetRollout", "StartRollout", "ListRollouts", "CancelRollouts"):
        call: Any = caller.channel.unary_unary(f"/osmosis.rollout.v1.RolloutService/{method}")
        refused = await refusal(call(payload))
        assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
        assert "protobuf" not in refused.text
    watch: Any = caller.channel.unary_stream("/osmosis.rollout.v1.RolloutService/WatchRollout")
    assert (await refusal(watch(payload).read())).code is grpc.StatusCode.INVALID_ARGUMENT
    assert (await caller.play(start())).outcome.stop.reason == "stop"


async def test_an_unknown_rpc_is_unimplemented(caller: Caller) -> None:
    call: Any = caller.channel.unary_unary("/osmosis.rollout.v1.RolloutService/Nothing")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_clients_that_vanish_are_detached_and_leave_no_tasks(caller: Caller) -> None:
    before = await warm(caller)
    uids: list[str] = []
    async with (
        TcpProxy(caller.server.grpc_port) as line,
        grpc.aio.insecure_channel(line.address, options=CHANNEL_OPTIONS) as channel,
    ):
        far = Caller(caller.server, channel)
        for n in range(10):
            request = start(agent="gated", cancel_after_detach=seconds(0), metadata_json=metadata(before=n))
            run = far.stub.RunRollout(pb.RunRolloutRequest(start=request))
            items = await first(run, 2 + n)
            uids.append(items[0].started.rollout.uid)
            await first(far.watch(uids[-1]), 1)
        waiting = [asyncio.ensure_future(far.finished(uid)) for uid in uids]
        await asyncio.sleep(0.1)
        assert (await caller.stub.GetServerInfo(pb.GetServerInfoRequest())).running == 10
        line.cut()
        assert all(isinstance(e, grpc.RpcError) for e in await asyncio.gather(*waiting, return_exceptions=True))
        for uid in uids:
            assert (await caller.ended(uid)).outcome.cancellation.reason == "detached"
    await settled(before)
    told = await caller.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (told.running, told.queued, told.finished) == (0, 0, 10)


async def test_clients_that_change_their_mind_at_once_leave_nothing(caller: Caller) -> None:
    before = await warm(caller)
    request = pb.RunRolloutRequest(start=start(agent="gated", cancel_after_detach=seconds(0)))
    for n in range(200):
        run = caller.stub.RunRollout(request)
        for _ in range(n % 20):
            await asyncio.sleep(0)
        run.cancel()

    async def none_runs() -> bool:
        return (await caller.stub.GetServerInfo(pb.GetServerInfoRequest())).running == 0  # type: ignore[no-any-return]

    await asyncio.sleep(0.1)
    await until(none_runs)
    await settled(before)
    listed = (await caller.stub.ListRollouts(pb.ListRolloutsRequest(page_size=1000))).rollouts
    assert {rollout.outcome.cancellation.reason for rollout in listed} <= {"detached"}


async def test_a_client_that_reads_nothing_and_leaves_is_detached(caller: Caller) -> None:
    before = await warm(caller)
    # More than the connection's flow-control window, so that the server is in the middle of a write.
    request = start(agent="gated", cancel_after_detach=seconds(0), metadata_json=metadata(before=5000))
    run = caller.stub.RunRollout(pb.RunRolloutRequest(start=request))
    uid = (await first(run, 1))[0].started.rollout.uid
    await asyncio.sleep(0.2)
    assert (await caller.get(uid)).state == pb.ROLLOUT_STATE_RUNNING
    run.cancel()
    assert (await caller.ended(uid)).outcome.cancellation.reason == "detached"
    await settled(before)


async def test_a_thousand_watchers_that_are_cancelled_leave_nothing(caller: Caller) -> None:
    before = await warm(caller)
    request = start("id", agent="gated", cancel_after_detach=seconds(0), metadata_json=metadata(before=3))
    run = caller.stub.RunRollout(pb.RunRolloutRequest(start=request))
    items = await first(run, 5)
    uid = items[0].started.rollout.uid
    watching = [caller.watch(uid, after=n % 4, detail=DETAILS[n % 3]) for n in range(1000)]
    await asyncio.gather(*(first(stream, 4 - n % 4) for n, stream in enumerate(watching)))
    run.cancel()
    for stream in watching[1:]:
        stream.cancel()
    await asyncio.sleep(0.2)
    assert (await caller.get(uid)).state == pb.ROLLOUT_STATE_RUNNING
    watching[0].cancel()
    assert (await caller.ended(uid)).outcome.cancellation.reason == "detached"
    await settled(before)


async def test_watchers_that_never_read_hold_up_nobody(caller: Caller, gated: Gated) -> None:
    notes = 2000
    request = start(agent="gated", metadata_json=metadata(before=notes))
    uid = (await caller.start(request)).rollout.uid
    idle = [caller.watch(uid) for _ in range(5)]
    gated.gate.set()
    assert (await caller.finished(uid)).outcome.stop.reason == "stop"
    events = await caller.events(uid)
    assert [event.sequence for event in events] == list(range(1, notes + 3))
    for stream in idle:
        stream.cancel()


async def test_a_server_that_stops_ends_its_streams_with_the_outcome(gated: Gated) -> None:
    async with Server([gated], settings()) as server:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}", options=CHANNEL_OPTIONS)
        caller = Caller(server, channel)
        uid = (await caller.start(start())).rollout.uid
        watching = caller.watch(uid)
        await first(watching, 1)
    [item] = [item async for item in watching]
    assert item.event.finished.outcome.failure.category == outcome_pb2.FAILURE_CATEGORY_INTERRUPTED
    assert await watching.code() is grpc.StatusCode.OK
    await channel.close()


async def test_two_servers_do_not_share_a_port(caller: Caller) -> None:
    with pytest.raises(OSError, match=str(caller.server.grpc_port)):
        await Server([Idle()], settings(grpc_port=caller.server.grpc_port)).__aenter__()
    assert (await caller.play(start())).outcome.stop.reason == "stop"
