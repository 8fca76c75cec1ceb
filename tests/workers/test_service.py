"""Three workers as one service: every API reaches every rollout over any connection."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import aiohttp
import grpc
import pytest
from osmosis.rollout.v1 import agent_service_pb2, group_pb2, rollout_service_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_gateway.fleet.fleet import Fleet
from rollout_server.testing.script import Script, ScriptedReply
from rollout_server.testing.trainer import StrictTrainer
from rollout_server.workers import call_router

from tests.support.bodies import body, run, start_request
from tests.support.server_client import refusal
from tests.support.tcp_proxy import TcpProxy
from tests.workers.service import Workers, workers

pytestmark = pytest.mark.timeout(300)  # the fixture starts four processes
CONNECTIONS = 8
"""Each of three workers gets at least one of them in 9 of 10 runs; the tests hold in the others, too."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    with workers(tmp_path_factory.mktemp("service"), 3) as service:
        yield service


def of_request(request_id: str, url: str) -> pb.StartRolloutRequest:
    request = start_request(request_id, url)
    request.request_id = request_id
    return request


def silent(*rollout_ids: str) -> StrictTrainer:
    """A trainer that completes the first turn of these rollouts after a minute."""
    script = Script([ScriptedReply(content="Never.", delay=60.0)])
    return StrictTrainer(scripts=dict.fromkeys(rollout_ids, script))


def server_of(uid: str) -> str:
    return uid.rpartition("-")[0]


async def all_rollouts(stub: Any, **selection: Any) -> list[pb.Rollout]:
    found, token = list[pb.Rollout](), ""
    while True:
        request = pb.ListRolloutsRequest(selection=pb.Selection(**selection), page_size=7, page_token=token)
        page = await stub.ListRollouts(request)
        found += page.rollouts
        token = page.next_page_token
        if not token:
            return found


async def test_100_rollouts_over_http_grpc_and_streams(service: Workers) -> None:
    http, rpc, streamed = (
        [f"{api}{number}" for number in range(count)] for api, count in (("h", 34), ("g", 34), ("s", 32))
    )
    async with (
        StrictTrainer(tools_from=service.url) as trainer,
        service.stubs(CONNECTIONS) as stubs,
        aiohttp.ClientSession(service.url, connector=aiohttp.TCPConnector(force_close=True)) as client,
        trainer.connected(f"127.0.0.1:{service.grpc_port}") as one,
        trainer.connected(f"127.0.0.1:{service.grpc_port}") as two,
    ):

        async def over_http(rollout_id: str) -> str:
            async with client.post("/rollout", json=body(rollout_id, trainer.url)) as response:
                assert (await response.json())["status"] == "COMPLETED"
                return response.headers["x-rollout-uid"]

        async def over_grpc(number: int, rollout_id: str) -> str:
            first, *_, last = [
                item async for item in run(stubs[number % CONNECTIONS], of_request(rollout_id, trainer.url))
            ]
            assert last.event.finished.outcome.stop.reason == "stop"
            return str(first.started.rollout.uid)

        async def over_stream(number: int, rollout_id: str) -> str:
            stream = (one, two)[number % 2]
            request = start_request(rollout_id, "")
            request.spec.ClearField("completions")
            (uid,) = await stream.start(request)
            assert (await stream.outcome(uid)).outcome.stop.reason == "stop"
            return uid

        uids = await asyncio.gather(
            *map(over_http, http),
            *(over_grpc(*each) for each in enumerate(rpc)),
            *(over_stream(*each) for each in enumerate(streamed)),
        )
        verdicts = {each: trainer.verdict(each) for each in (*http, *rpc, *streamed)}
        assert [each for each, verdict in verdicts.items() if verdict is None or not verdict.accepted] == []
        assert (one.faults, two.faults) == ((), ())
        for stub in stubs:
            listed = await all_rollouts(stub, rollout_ids=[*http, *rpc, *streamed])
            assert sorted(each.uid for each in listed) == sorted(uids)
            times = [each.create_time.ToNanoseconds() for each in listed]
            assert times == sorted(times, reverse=True)
    servers = Counter(map(server_of, uids))
    assert len(servers) == 3
    assert min(servers.values()) >= 5
    # The second stream went to another worker than the first.
    assert len({server_of(uid) for uid in uids[-32:]}) == 2


async def test_duplicates_of_a_start_that_race_over_all_connections_are_one_rollout(service: Workers) -> None:
    async with silent("raced") as trainer, service.stubs(CONNECTIONS) as stubs:
        request = of_request("raced", trainer.url)
        started = await asyncio.gather(*(stub.StartRollout(request) for stub in stubs for _ in range(4)))
        (uid,) = {each.rollout.uid for each in started}
        assert sum(not each.attached for each in started) == 1
        await stubs[0].CancelRollouts(pb.CancelRolloutsRequest(selection=pb.Selection(uids=[uid])))


async def test_a_rollout_is_watched_listed_and_cancelled_over_any_connection(service: Workers) -> None:
    names = [f"any{number}" for number in range(6)]
    async with (
        silent(*names) as trainer,
        service.stubs(CONNECTIONS) as stubs,
        aiohttp.ClientSession(service.url, connector=aiohttp.TCPConnector(force_close=True)) as client,
    ):
        uids = [(await stubs[0].StartRollout(of_request(name, trainer.url))).rollout.uid for name in names]
        for stub in stubs:
            for uid in uids:
                assert (await stub.GetRollout(pb.GetRolloutRequest(uid=uid))).rollout.uid == uid
            assert {each.uid for each in await all_rollouts(stub, rollout_ids=names)} == set(uids)
            missing = await refusal(stub.GetRollout(pb.GetRolloutRequest(uid="0123456789-nothing")))
            assert (missing.code, missing.reason) == (grpc.StatusCode.NOT_FOUND, "ROLLOUT_NOT_FOUND")
            wrong = await refusal(stub.CancelRollouts(pb.CancelRolloutsRequest()))
            assert wrong.code is grpc.StatusCode.INVALID_ARGUMENT
        for uid in uids:
            async with client.get(f"/v1/rollouts/{uid}") as response:
                assert (await response.json())["uid"] == uid
        watches = [stub.WatchRollout(pb.WatchRolloutRequest(uid=uid)) for stub in stubs for uid in uids]
        each_item = [aiter(watch) for watch in watches]
        assert {(await anext(items)).event.sequence for items in each_item} == {1}
        waits = [
            asyncio.ensure_future(stub.WaitRollout(pb.WaitRolloutRequest(uid=uids[0]), timeout=60)) for stub in stubs
        ]
        response = await stubs[-1].CancelRollouts(pb.CancelRolloutsRequest(selection=pb.Selection(uids=uids)))
        assert set(response.uids) == set(uids)
        assert {(await each).rollout.outcome.cancellation.reason for each in waits} == {"cancelled"}
        ends = [[item async for item in items][-1].event.finished.outcome.WhichOneof("end") for items in each_item]
        assert set(ends) == {"cancellation"}


async def test_a_deadline_and_a_cancellation_pass_through(service: Workers) -> None:
    names = [f"late{number}" for number in range(4)]
    async with silent(*names) as trainer, service.stubs(4) as stubs:
        for name, stub in zip(names, stubs, strict=True):
            request = of_request(name, trainer.url)
            request.spec.cancel_after_detach.FromSeconds(0)
            call = stub.RunRollout(pb.RunRolloutRequest(start=request))
            uid = (await call.read()).started.rollout.uid
            with pytest.raises(grpc.aio.AioRpcError) as late:
                async for _ in stubs[0].WatchRollout(pb.WatchRolloutRequest(uid=uid), timeout=0.5):
                    pass
            call.cancel()
            request_again = pb.GetRolloutRequest(uid=uid)  # which does not attach to the rollout
            while not (found := await stubs[0].GetRollout(request_again)).rollout.HasField("outcome"):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            assert found.rollout.outcome.WhichOneof("end") == "cancellation"
            assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_groups_are_found_over_any_connection(service: Workers) -> None:
    async with StrictTrainer(tools_from=service.url) as trainer, service.stubs(CONNECTIONS) as stubs:
        start = start_request("grouped", trainer.url)
        start.spec.group_id = "mine"
        request = group_pb2.StartGroupRequest(spec=start.spec, count=3, request_id="grouped")
        started = await asyncio.gather(*(stub.StartGroup(request) for stub in stubs))
        assert len({tuple(member.uid for member in each.group.members) for each in started}) == 1
        for stub in stubs:
            items = [item async for item in stub.WatchGroup(pb.WatchGroupRequest(group_id="mine"))]
            assert len(items) == 4
            assert len((await stub.GetGroup(group_pb2.GetGroupRequest(group_id="mine"))).group.members) == 3


@pytest.mark.parametrize("new_connection", [False, True])
async def test_the_stream_of_a_trainer_is_cut_and_lands_whole(service: Workers, new_connection: bool) -> None:
    names = [f"cut{number}/{new_connection}" for number in range(20)]
    async with (
        StrictTrainer(tools_from=service.url) as trainer,
        TcpProxy(service.grpc_port) as line,
        trainer.connected(line.address) as stream,
    ):

        async def cut() -> None:
            for _ in range(8):
                await asyncio.sleep(0.1)
                if new_connection:
                    line.cut()
                else:
                    stream.cut()

        async def play(name: str) -> str:
            request = start_request(name, "")
            request.spec.ClearField("completions")
            (uid,) = await stream.start(request)
            assert (await stream.outcome(uid)).outcome.stop.reason == "stop"
            return uid

        cutting = asyncio.create_task(cut())
        uids = await asyncio.gather(*map(play, names))
        await cutting
        assert stream.connections > 2
        assert stream.faults == ()
        assert len({server_of(uid) for uid in uids}) == 1
        assert all((verdict := trainer.verdict(name)) is not None and verdict.accepted for name in names)


async def test_the_metrics_of_all_workers_are_one_page(service: Workers) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as client:
        for url in (f"{service.url}/metrics", f"http://127.0.0.1:{service.metrics_port}/metrics"):
            async with client.get(url) as response:
                text = await response.text()
                assert response.headers["content-type"].startswith("text/plain")
            lines = text.splitlines()
            assert [line for line in lines if line.startswith("rollout_worker_up{")] == [
                f'rollout_worker_up{{worker="{index}"}} 1' for index in range(3)
            ]
            assert sum(line.startswith("rollout_running{") for line in lines) == 3
            assert sum(line.startswith("# TYPE rollout_running ") for line in lines) == 1
            assert all('worker="' in line for line in lines if line and not line.startswith("#"))


async def test_info_agents_and_the_page_need_no_particular_worker(service: Workers) -> None:
    async with service.stubs(CONNECTIONS) as stubs, aiohttp.ClientSession(service.url) as client:
        for stub in stubs:
            info = await stub.GetServerInfo(pb.GetServerInfoRequest())
            assert info.max_running == 102  # the sum of the shares of 100
            assert len((await stub.ListAgents(pb.ListAgentsRequest())).agents) == 1
            assert await stub.SetPolicy(pb.SetPolicyRequest(completions_url="http://127.0.0.1:1/", policy={"step": 1}))
            assert await stub.RedeliverOutcomes(pb.RedeliverOutcomesRequest(selection=pb.Selection(all=True)))
        for path in ("/", "/readyz", "/v1/server", "/v1/agents"):
            async with client.get(path) as response:
                assert response.status == 200


def test_every_rpc_has_a_rule() -> None:
    methods, of_agents = (
        {method.name for method in file.DESCRIPTOR.services_by_name[name].methods}
        for file, name in ((rollout_service_pb2, "RolloutService"), (agent_service_pb2, "AgentService"))
    )
    of_rollout = {"WatchRollout", "WaitRollout", "GetRollout", "AcknowledgeOutcome", "DecodeTokens", *of_agents}
    methods |= of_agents
    rules = [set(call_router.STARTS), call_router.ON_ALL, call_router.ON_ANY, of_rollout, call_router.OF_GROUP]
    assert set.union(*map(set, rules)) == methods
    assert sum(map(len, rules)) == len(methods)
    assert [name for name in methods - call_router.ON_ANY if not hasattr(Fleet, name)] == []
