"""Health per service, from startup to the drain."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from tests.support.agents import Gated
from tests.support.server_client import Caller, first, settled
from tests.support.start_requests import start

SERVICE = "osmosis.rollout.v1.RolloutService"
AGENTS = "osmosis.rollout.v1.AgentService"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def status(caller: Caller, service: str) -> int:
    """The result of a health check."""
    response: Any = await HealthStub(caller.channel).Check(health_pb2.HealthCheckRequest(service=service))
    return int(response.status)


@pytest.mark.parametrize("service", ["", SERVICE, AGENTS])
async def test_a_service_serves_until_the_server_drains(caller: Caller, gated: Gated, service: str) -> None:
    assert await status(caller, service) == SERVING
    uid = (await caller.start(start(agent="gated"))).rollout.uid
    draining = asyncio.create_task(caller.server.drain())
    await asyncio.sleep(0)
    assert await status(caller, service) == NOT_SERVING
    gated.gate.set()
    assert (await caller.finished(uid)).outcome.stop.reason == "stop"
    await draining
    assert await status(caller, service) == NOT_SERVING


@pytest.mark.parametrize("service", ["osmosis.rollout.v1.Nothing", "RolloutService", SERVICE.upper()])
async def test_a_service_that_is_not_there_is_not_found(caller: Caller, service: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await status(caller, service)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("service", ["", SERVICE, AGENTS])
async def test_a_watch_tells_when_the_drain_begins(caller: Caller, service: str) -> None:
    watching = HealthStub(caller.channel).Watch(health_pb2.HealthCheckRequest(service=service))
    assert [response.status for response in await first(watching, 1)] == [SERVING]
    draining = asyncio.create_task(caller.server.drain())
    assert [response.status for response in await first(watching, 1)] == [NOT_SERVING]
    watching.cancel()
    await draining


async def test_a_watch_of_a_service_that_is_not_there_says_so(caller: Caller) -> None:
    watching = HealthStub(caller.channel).Watch(health_pb2.HealthCheckRequest(service="osmosis.rollout.v1.Nothing"))
    [response] = await first(watching, 1)
    assert response.status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watching.cancel()


async def test_a_hundred_watchers_of_health_are_told_and_leave_nothing(caller: Caller) -> None:
    await status(caller, "")
    before = len(asyncio.all_tasks())
    stub = HealthStub(caller.channel)
    watching = [stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE)) for _ in range(100)]
    assert [(await first(stream, 1))[0].status for stream in watching] == [SERVING] * 100
    await caller.server.drain()
    assert [(await first(stream, 1))[0].status for stream in watching] == [NOT_SERVING] * 100
    for stream in watching:
        stream.cancel()
    await settled(before)
