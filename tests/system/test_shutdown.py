"""Signals to a real server: the first one drains it, the second one ends its rollouts."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from osmosis.rollout.v1 import outcome_pb2
from osmosis.rollout.v1.outcome_pb2 import Outcome
from rollout_server.testing.trainer import StrictTrainer

from tests.support.bodies import body, rpc, run, start_request, tool_texts
from tests.support.gated_model import GatedModel
from tests.support.processes import ANY_PORTS, Serving, command, serve

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass
class Running:
    """A server with one running rollout over HTTP and one over gRPC, and its health stream."""

    server: Serving
    trainer: StrictTrainer
    gate: GatedModel
    over_http: asyncio.Task[httpx.Response]
    over_grpc: asyncio.Task[Outcome]
    health: AsyncIterator[Any]

    async def says(self, status: int) -> None:
        """Assert that the next health status is this one."""
        assert (await anext(self.health)).status == status


@asynccontextmanager
async def running(cwd: Path) -> AsyncIterator[Running]:
    gate = GatedModel()
    async with (
        serve(cwd=cwd) as server,
        StrictTrainer(model=gate, tools_from=server.url) as trainer,
        httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as client,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel,
        rpc(server.grpc_port) as stub,
    ):

        async def outcome_over_grpc() -> Outcome:
            items = [item async for item in run(stub, start_request("over-grpc", trainer.url))]
            return items[-1].event.finished.outcome

        over_http = asyncio.create_task(client.post("/rollout", json=body("over-http", trainer.url)))
        await gate.asked()
        over_grpc = asyncio.create_task(outcome_over_grpc())
        while len(trainer.requests) < 2:  # noqa: ASYNC110 - its completion request waits behind the one at the gate
            await asyncio.sleep(0.01)
        health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        try:
            yield Running(server, trainer, gate, over_http, over_grpc, aiter(health))
        finally:
            gate.open()
            over_http.cancel(), over_grpc.cancel()


async def refused(server: Serving, trainer: StrictTrainer) -> None:
    """Assert that the server refuses new rollouts, with a retry delay."""
    async with rpc(server.grpc_port) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.StartRollout(start_request("late", trainer.url))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    status = rpc_status.from_call(caught.value)
    assert status is not None
    assert any(detail.Is(RetryInfo.DESCRIPTOR) for detail in status.details)
    async with httpx.AsyncClient(base_url=server.url, timeout=30, trust_env=False) as client:
        late = await client.post("/rollout", json=body("late", trainer.url))
    assert late.status_code == 503
    assert int(late.headers["retry-after"]) >= 1
    assert "stopping" in late.json()["detail"]


async def test_the_first_signal_lets_rollouts_finish(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.says(SERVING)
        world.server.send(signal.SIGTERM)
        await world.says(NOT_SERVING)
        await refused(world.server, world.trainer)
        assert not world.over_http.done()
        assert not world.over_grpc.done()
        world.gate.open()
        answer, outcome = await world.over_http, await world.over_grpc
        assert answer.status_code == 200
        assert answer.json()["status"] == "COMPLETED"
        assert tool_texts(answer.json()["final_messages"]) == ["8", "16"]
        assert outcome.stop.reason == "stop"
        assert await world.server.ended() == 0
        judged = [world.trainer.verdict(rollout_id) for rollout_id in ("over-http", "over-grpc")]
        assert all(verdict is not None and verdict.accepted for verdict in judged)
        assert world.trainer.verdict("late") is None
    assert "Traceback" not in world.server.text
    assert "ERROR" not in world.server.text
    assert world.server.text.count("rollout finished") == 2


async def test_the_second_signal_ends_them(tmp_path: Path) -> None:
    """Ctrl-C, twice."""
    async with running(tmp_path) as world:
        await world.says(SERVING)
        world.server.send(signal.SIGINT)
        await world.says(NOT_SERVING)
        assert not world.over_http.done()
        world.server.send(signal.SIGINT)
        answer, outcome = await world.over_http, await world.over_grpc
        assert answer.status_code == 200
        assert (answer.json()["status"], answer.json()["finish_reason"]) == ("ERROR", "error")
        assert answer.json()["extra_fields"]["error_category"] == "interrupted"
        assert "server stopped" in answer.json()["error_message"]
        assert outcome.failure.category == outcome_pb2.FAILURE_CATEGORY_INTERRUPTED
        assert await world.server.ended() == 0
    assert "Traceback" not in world.server.text


def taken() -> socket.socket:
    """A listener that allows others to share its port."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    return listener


@pytest.mark.parametrize("flag", ["--http-port", "--grpc-port"])
async def test_a_port_that_is_taken_is_told_in_one_line(tmp_path: Path, flag: str) -> None:
    with taken() as listener:
        port = str(listener.getsockname()[1])
        told = await command("serve", *ANY_PORTS, flag, port, cwd=tmp_path)
    assert told.code == 1
    assert port in told.err
    assert "Traceback" not in told.err
    lines = told.err.strip().splitlines()
    assert len(lines) == 1
    assert "cannot listen on" in lines[0]
