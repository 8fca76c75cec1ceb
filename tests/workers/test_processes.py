"""The processes of a server with workers: killed, stopped, and refused."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Any

import grpc
import httpx
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
            os.kill(processes[0], signal.SIGSTOP)  # one that cannot notice that its parent is gone
            service.send(signal.SIGKILL)
            assert service.process is not None
            service.process.wait()
        await _drains(service, sorted(uids))
        assert gone(processes, 20)
        await _is_refused(service)


async def _is_refused(service: Workers) -> None:
    """Fewer workers than journals, a journal that cannot be used, and a port that is in use."""
    service.count = 1
    assert await asyncio.to_thread(service.begin().wait) == 1
    assert "start with --workers 2" in service.log
    service.count = 2
    broken = service.directory / "broken"
    broken.mkdir()
    (broken / "worker-1").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(service.variables, "ROLLOUT_JOURNAL", str(broken))
        assert await asyncio.to_thread(service.begin().wait) == 1
    lines = [line for line in service.log.splitlines() if "INFO" not in line]
    assert len(lines) == 2
    assert "worker-1 cannot be used" in lines[0]
    assert "worker 1 ended with exit code 1, so the server ends" in lines[1]
    with socket.create_server(("127.0.0.1", service.http_port)):
        assert await asyncio.to_thread(service.begin().wait) == 1
    assert "cannot listen on" in service.log or "Address already in use" in service.log


async def _drains(service: Workers, uids: list[str]) -> None:
    """A start at once after the death of the parent finds all rollouts. SIGTERM waits for those that run."""
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


async def test_a_worker_that_hangs_holds_no_call_for_ever(tmp_path: Path) -> None:
    with workers(tmp_path, 2) as service:
        hangs = service.processes[1]
        os.kill(hangs, signal.SIGSTOP)
        async with service.stubs(12) as stubs, httpx.AsyncClient(trust_env=False, timeout=2) as probe:
            asked = [asyncio.ensure_future(stub.ListRollouts(pb.ListRolloutsRequest())) for stub in stubs]
            while True:  # about every second connection is to the worker that hangs
                try:
                    page = (await probe.get(f"http://127.0.0.1:{service.metrics_port}/metrics")).text
                    break
                except httpx.TimeoutException:
                    continue
            assert 'rollout_worker_up{worker="0"} 1' in page
            assert 'rollout_worker_up{worker="1"} 0' in page
            done, hanging = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            done |= (await asyncio.wait(hanging, timeout=5.0))[0] if hanging else set()
            assert done
            for call in asked:
                call.cancel()
            errors = [call.exception() for call in done]
            assert {error.code() for error in errors if isinstance(error, grpc.aio.AioRpcError)} == {
                grpc.StatusCode.UNAVAILABLE
            }
        service.send(signal.SIGTERM)
        await asyncio.sleep(0.5)
        service.send(signal.SIGTERM)
        assert service.process is not None
        assert await asyncio.to_thread(service.process.wait) == 1
        assert "worker 1 ended with SIGKILL while it was stopping" in service.log
        assert gone(service.processes.values(), 5)
