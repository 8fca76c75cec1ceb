"""Streams that are silent for long: the SDKs take the heartbeats, and raise an error if the stream fails after them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from aiohttp import web
from rollout_gateway.settings import GatewaySettings

from tests.clients.recording import Recorder, recording
from tests.clients.service import (
    ENVIRONMENT,
    TurnModel,
    World,
    access_environment,
    program,
    run_program,
    serving_world,
)
from tests.clients.test_programs import SAYS
from tests.support.gateways import serving

pytestmark = pytest.mark.skipif(
    not (ENVIRONMENT / ".ready").exists(), reason="no .venv-clients: `make .venv-clients/.ready` makes it"
)
BEATS = {
    "openai_chat": b": heartbeat",
    "openai_responses": b"response.in_progress",
    "anthropic_messages": b"event: ping",
}


@asynccontextmanager
async def slow_world() -> AsyncIterator[World]:
    """An engine that waits, and a gateway that sends a heartbeat every 20 ms."""
    async with serving_world(TurnModel(SAYS, odd=True)) as world:
        world.engine.free.clear()
        address = f"127.0.0.1:{world.server.grpc_port}"
        async with serving(address, GatewaySettings(heartbeat_seconds=0.02)) as (host, port):
            yield replace(world, endpoint=f"http://{host}:{port}")


async def until_beats(recorder: Recorder, beat: bytes, running: asyncio.Task[str]) -> None:
    while not any(each.response.count(beat) >= 3 for each in recorder.calls):  # another process
        assert not running.done(), running
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("name", BEATS)
async def test_an_sdk_waits_through_heartbeats(name: str) -> None:
    async with slow_world() as world, recording(world.endpoint) as recorder:
        uid, path, bearer = await world.start()
        environment = access_environment(recorder.url + path, bearer["authorization"].split()[1])
        running = asyncio.create_task(run_program(program(name, "--stream"), environment, None))
        await until_beats(recorder, BEATS[name], running)
        world.engine.free.set()
        assert await running == "You are welcome."
        outcome = await world.finish(uid, path, bearer)
        assert len(recorder.calls) == 3
    assert outcome.capture.continued == 2


@pytest.mark.parametrize("name", BEATS)
async def test_an_sdk_raises_if_a_stream_fails_after_heartbeats(name: str) -> None:
    async with slow_world() as world, recording(world.endpoint) as recorder:
        uid, path, bearer = await world.start()
        environment = access_environment(recorder.url + path, bearer["authorization"].split()[1])
        running = asyncio.create_task(run_program(program(name, "--stream"), environment, None))
        await until_beats(recorder, BEATS[name], running)
        world.engine.first.append(
            web.json_response({"error": {"message": "No such adapter.", "code": 400}}, status=400)
        )
        world.engine.free.set()
        with pytest.raises(AssertionError, match="Error"):
            await running
        outcome = (await world.client.wait(uid, timeout=60)).outcome
    assert "No such adapter." in outcome.failure.message
