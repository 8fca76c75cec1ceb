"""The processes of a server with workers: killed, stopped, and refused."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_server.testing.script import Script, ScriptedReply
from rollout_server.testing.trainer import StrictTrainer

from tests.support.bodies import start_request
from tests.workers.service import Workers, gone, workers
from tests.workers.test_service import all_rollouts, server_of

pytestmark = pytest.mark.timeout(300)  # starts of three servers
MANY = 60


def keyed(name: str, trainer: StrictTrainer) -> pb.StartRolloutRequest:
    request = start_request(name, f"grpc://127.0.0.1:{trainer.grpc_port}")
    request.request_id = name
    request.spec.completions.replays_turn_keys = True  # so that a turn that was interrupted can be resumed
    return request


async def retry_later(error: grpc.aio.AioRpcError) -> None:
    if error.code() is not grpc.StatusCode.UNAVAILABLE:
        raise error
    await asyncio.sleep(0.1)


async def outcome(stub: Any, uid: str) -> pb.Rollout:
    """The finished rollout, whose worker may be away for a while."""
    while True:
        try:
            response = await stub.WaitRollout(pb.WaitRolloutRequest(uid=uid), timeout=60)
        except grpc.aio.AioRpcError as error:
            await retry_later(error)
        else:
            assert response.rollout.HasField("outcome")
            return response.rollout


async def started(stub: Any, request: pb.StartRolloutRequest) -> str:
    while True:
        try:
            return str((await stub.StartRollout(request)).rollout.uid)
        except grpc.aio.AioRpcError as error:
            await retry_later(error)


async def test_a_worker_that_is_killed_continues_and_the_parent_takes_all_with_it(tmp_path: Path) -> None:
    names = [f"r{number}" for number in range(MANY)]
    slow = Script(then_model=True)
    with workers(tmp_path, 2) as service:
        async with StrictTrainer(tools_from=service.url, script=slow) as trainer, service.stubs(4) as stubs:
            uids = await asyncio.gather(
                *(started(stubs[at % 4], keyed(name, trainer)) for at, name in enumerate(names))
            )
            victim = service.processes[1]
            os.kill(victim, signal.SIGKILL)
            # Repeated starts find the rollouts, before and after the worker is back.
            again = await asyncio.gather(
                *(started(stubs[at % 3], keyed(name, trainer)) for at, name in enumerate(names))
            )
            assert again == uids
            ended = await asyncio.gather(*(outcome(stubs[at % 4], uid) for at, uid in enumerate(uids)))
            # A calculator tool that was running must not run twice, so such a rollout ends; all others continue.
            failures = [each.outcome.failure for each in ended if each.outcome.stop.reason != "stop"]
            assert [each for each in failures if "must not run twice" not in each.message] == []
            assert len(failures) < MANY / 3
            assert sorted(each.uid for each in await all_rollouts(stubs[0])) == sorted(uids)
            assert len({server_of(uid) for uid in uids}) == 2
            whole = [each.spec.rollout_id for each in ended if each.outcome.stop.reason == "stop"]
            assert all((verdict := trainer.verdict(name)) is not None and verdict.accepted for name in whole)
            assert service.processes[1] != victim
            processes = list(service.processes.values())
            service.send(signal.SIGKILL)
            assert await asyncio.to_thread(gone, processes, 20)
            assert service.process is not None
            service.process.wait()
        await _is_refused(service)
        await _drains(service, sorted(uids))


async def _is_refused(service: Workers) -> None:
    """Fewer workers than journals, and a port that is in use."""
    service.count = 1
    assert await asyncio.to_thread(service.begin().wait) == 1
    assert "start with --workers 2" in service.log
    service.count = 2
    with socket.create_server(("127.0.0.1", service.http_port)):
        assert await asyncio.to_thread(service.begin().wait) == 1
    assert "cannot listen on" in service.log or "Address already in use" in service.log


async def _drains(service: Workers, uids: list[str]) -> None:
    """After a restart of all workers their rollouts are still there. SIGTERM waits for those that run."""
    await asyncio.to_thread(service.start)
    scripts = {f"last{number}": Script([ScriptedReply(content="The end.", delay=1.5)]) for number in range(6)}
    async with StrictTrainer(scripts=scripts) as trainer, service.stubs(3) as stubs:
        assert sorted(each.uid for each in await all_rollouts(stubs[0])) == uids
        last = [await started(stubs[at % 3], keyed(name, trainer)) for at, name in enumerate(scripts)]
        waits = [asyncio.create_task(outcome(stubs[at % 3], uid)) for at, uid in enumerate(last)]
        await asyncio.sleep(0.2)
        service.send(signal.SIGTERM)
        assert {(await each).outcome.stop.reason for each in waits} == {"stop"}
        assert service.process is not None
        assert await asyncio.to_thread(service.process.wait) == 0
    assert gone(service.processes.values(), 5)
