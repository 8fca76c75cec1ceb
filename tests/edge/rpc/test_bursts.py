"""Many concurrent calls: none is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from typing import Any

import pytest
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_server.runtime.registry.admission import StartAdmission

from tests.edge.rpc.conftest import OpenServer
from tests.support.agents import Gated, Idle
from tests.support.server_client import Caller, until
from tests.support.start_requests import start


async def test_ten_thousand_calls_at_the_same_time_are_all_answered(caller: Caller) -> None:
    stub = caller.stub
    calls = [stub.GetServerInfo(pb.GetServerInfoRequest()) for _ in range(10_000)]
    answers = await asyncio.gather(*calls)
    assert {answer.version for answer in answers} == {answers[0].version}
    assert len(answers) == 10_000


async def test_two_thousand_rollouts_at_the_same_time_are_all_played(open_server: OpenServer) -> None:
    caller = await open_server(Idle(), max_running=10)
    stub = caller.stub
    started = await asyncio.gather(*(stub.StartRollout(start(rollout_id=f"r{n}")) for n in range(2000)))
    uids = {response.rollout.uid for response in started}
    assert len(uids) == 2000

    async def all_finished() -> bool:
        return bool((await stub.GetServerInfo(pb.GetServerInfoRequest())).finished == 2000)

    await until(all_finished)
    listed: set[str] = set()
    request = pb.ListRolloutsRequest(page_size=1000)
    while not listed or request.page_token:
        page = await stub.ListRollouts(request)
        listed |= {rollout.uid for rollout in page.rollouts if rollout.outcome.stop.reason == "stop"}
        request.page_token = page.next_page_token
    assert listed == uids


async def test_a_burst_beyond_the_queue_is_refused_call_by_call(open_server: OpenServer, gated: Gated) -> None:
    caller = await open_server(gated, max_running=10, max_queued=90)
    stub = caller.stub
    results = await asyncio.gather(*(stub.StartRollout(start()) for _ in range(500)), return_exceptions=True)
    taken = [result for result in results if isinstance(result, pb.StartRolloutResponse)]
    assert len(taken) == 100
    assert {str(result.code()) for result in results if isinstance(result, Exception)} == {  # type: ignore[attr-defined]
        "StatusCode.RESOURCE_EXHAUSTED"
    }
    gated.gate.set()
    for response in taken:
        assert (await caller.finished(response.rollout.uid, pb.ROLLOUT_VIEW_BASIC)).outcome.stop.reason == "stop"


async def test_a_large_request_is_read_in_a_thread(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing takes seconds, during which other calls must be served."""
    on_loop: list[bool] = []
    admit = StartAdmission.admit

    def watched(self: StartAdmission, wish: Any, also_wrong: Iterable[Any] = ()) -> Any:
        on_loop.append(threading.current_thread() is threading.main_thread())
        return admit(self, wish, also_wrong)

    monkeypatch.setattr(StartAdmission, "admit", watched)
    metadata = '{"rows":[' + ",".join(["{}"] * 30_000) + "]}"
    large, small = start("one", metadata_json=metadata), start("two")
    for request in (large, small):
        await caller.stub.StartRollout(request)
        assert [event async for event in caller.stub.RunRollout(pb.RunRolloutRequest(start=request))]
    assert on_loop == [False, False, True, True]
