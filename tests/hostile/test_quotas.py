"""Callers that exceed their quota are refused, and others still get their share. See also `tests/runtime/test_quotas.py`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import aiohttp
import grpc
import pytest
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_server.edge.api_keys import entry_of

from tests.support.agents import Gated
from tests.support.server_client import refusal, serving, until
from tests.support.start_requests import HELLO, NOWHERE, json_message, start

ALICE, BOB = "key-of-alice-0123", "key-of-bob-4567"
KEYS = (entry_of("alice", ALICE), entry_of("bob", BOB))


def bearing(key: str) -> Sequence[tuple[str, str]]:
    return (("authorization", f"Bearer {key}"),)


@pytest.fixture
async def gated() -> AsyncIterator[Gated]:
    agent = Gated()
    yield agent
    agent.gate.set()


async def test_both_protocols_say_when_to_come_back(gated: Gated) -> None:
    large = json_message(HELLO.replace("Please", "Please " * 20_000))
    async with serving(gated, http=True, max_active_bytes=2**20) as caller:
        taken = [(await caller.start(start(messages=[large]))).rollout.uid for _ in range(3)]
        busy = await refusal(caller.stub.StartRollout(start(messages=[large])))
        assert (busy.code, busy.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_BYTES")
        assert busy.retry_after == 1
        body = {"messages": [{"role": "user", "content": "x" * 250_000}], "completions": {"url": NOWHERE}}
        body["tokenizer"] = {"name": "toy"}
        url = f"http://127.0.0.1:{caller.server.http_port}/v1/rollouts"
        async with aiohttp.ClientSession() as http, http.post(url, json=body) as response:
            assert (response.status, response.headers["retry-after"]) == (429, "1")
            assert (await response.json())["error"]["code"] == "TOO_MANY_BYTES"
        gated.gate.set()
        for uid in taken:
            await caller.finished(uid)
        await caller.start(start(messages=[large]))


async def test_a_caller_that_takes_all_it_can_leaves_room_for_another(gated: Gated) -> None:
    async with serving(gated, api_keys=KEYS, max_running=2, max_queued=20) as caller:
        stub = caller.stub

        async def greedy() -> bool:
            try:
                await stub.StartRollout(start(), metadata=bearing(ALICE))
            except grpc.aio.AioRpcError:
                return True
            return False

        await until(greedy)
        info = await stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (info.running, info.queued) == (2, 18)
        first = await stub.StartRollout(start(), metadata=bearing(BOB))
        assert first.rollout.state == pb.ROLLOUT_STATE_QUEUED
        await stub.CancelRollouts(
            pb.CancelRolloutsRequest(selection=pb.Selection(states=[pb.ROLLOUT_STATE_RUNNING])), metadata=bearing(ALICE)
        )

        async def runs() -> bool:
            got = await stub.GetRollout(pb.GetRolloutRequest(uid=first.rollout.uid), metadata=bearing(BOB))
            return bool(got.rollout.state == pb.ROLLOUT_STATE_RUNNING)

        await until(runs)
