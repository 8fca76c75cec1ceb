"""Every rpc in its success case."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import rollout_server
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_server.core.limits import Limits
from rollout_server.edge.wire.function_tool import function_tool_json

from tests.edge.rpc.conftest import OpenServer
from tests.support.agents import Gated, Idle
from tests.support.grpc_trainer import GrpcTrainer
from tests.support.grpc_trainer import serving as trainer_of
from tests.support.server_client import Caller, first, kinds, refusal
from tests.support.start_requests import seconds, start, target

UNKNOWN = "0123456789abcdef0123"


class Bounded(Idle):
    """An agent with limits."""

    name = "bounded"
    version = "7"
    limits = Limits(turns=4, seconds=2.5)


async def test_start_answers_with_the_rollout_on_record(caller: Caller) -> None:
    started = await caller.start(start(agent="calculator", labels={"a": "b"}))
    rollout = started.rollout
    assert not started.attached
    assert [tool.name for tool in started.tools] == ["add", "subtract", "multiply", "divide"]
    assert 1 <= len(rollout.uid) <= 64
    assert set(rollout.uid) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
    assert (rollout.spec.agent, rollout.spec.limits.time.seconds) == ("calculator", 600)
    assert dict(rollout.spec.labels) == {"a": "b"}
    assert rollout.HasField("create_time")
    assert not rollout.spec.messages
    assert (await caller.get(rollout.uid)).uid == rollout.uid


async def test_a_start_brings_function_tools_where_they_are_requested(caller: Caller) -> None:
    plain = start("id", agent="calculator")
    requested = pb.StartRolloutRequest(request_id="id", spec=plain.spec, include_function_tools=True)
    for attached in (False, True):  # an attached rollout has them, too, and the request's fingerprint is the same
        started = await caller.start(requested)
        assert started.attached is attached
        assert [*started.function_tools_json] == [function_tool_json(tool) for tool in started.tools] != []
    assert not (await caller.start(plain)).function_tools_json
    [item] = await first(caller.stub.RunRollout(pb.RunRolloutRequest(start=requested)), 1)
    assert (len(item.started.tools), len(item.started.function_tools_json)) == (4, 0)


async def test_the_lower_limit_holds_and_is_shown(open_server: OpenServer) -> None:
    caller = await open_server(Bounded())
    limits = (await caller.start(start(limits={"turns": 9, "time": seconds(1.5), "tool_turns": 0}))).rollout.spec.limits
    assert (limits.turns, limits.time, limits.tool_turns) == (4, seconds(1.5), 0)
    assert limits.HasField("tool_turns")
    assert not limits.HasField("generated_tokens")


async def test_no_rollout_takes_longer_than_the_server_allows(open_server: OpenServer) -> None:
    caller = await open_server(Idle(), max_seconds=90, timeout_seconds=80)
    for asked, granted in ((None, 80), (seconds(89), 89), (seconds(91), 90), (seconds(10**9), 90)):
        limits = (await caller.start(start(limits={"time": asked} if asked else None))).rollout.spec.limits
        assert limits.time == seconds(granted)


async def test_what_is_forgotten_is_not_there_and_those_who_listened_have_heard_it(
    open_server: OpenServer, gated: Gated
) -> None:
    caller = await open_server(gated, max_records=0)
    request = start("id")
    uid = (await caller.start(request)).rollout.uid
    watching, waiting = asyncio.create_task(caller.events(uid)), asyncio.create_task(caller.finished(uid))
    await asyncio.sleep(0.1)
    gated.gate.set()
    assert kinds(await watching) == ["accepted", "finished"]
    assert (await waiting).outcome.stop.reason == "stop"
    assert (await refusal(caller.get(uid))).code is grpc.StatusCode.NOT_FOUND
    assert not (await caller.stub.ListRollouts(pb.ListRolloutsRequest())).rollouts
    again = await caller.start(request)
    assert (again.attached, again.rollout.uid == uid) == (False, False)


async def test_run_begins_with_started_and_ends_with_finished(caller: Caller) -> None:
    items = [item async for item in caller.stub.RunRollout(pb.RunRolloutRequest(start=start()))]
    assert [item.WhichOneof("item") for item in items] == ["started", "event", "event"]
    assert kinds(item.event for item in items[1:]) == ["accepted", "finished"]
    assert items[-1].event.finished.outcome.stop.reason == "stop"


async def test_wait_answers_at_the_end_or_when_its_time_is_over(caller: Caller, gated: Gated) -> None:
    uid = (await caller.start(start(agent="gated"))).rollout.uid
    for timeout in (seconds(0), seconds(0.05)):
        waited = await caller.stub.WaitRollout(pb.WaitRolloutRequest(uid=uid, timeout=timeout))
        assert waited.rollout.state == pb.ROLLOUT_STATE_RUNNING
        assert not waited.rollout.HasField("outcome")
    waiting = asyncio.ensure_future(caller.stub.WaitRollout(pb.WaitRolloutRequest(uid=uid, timeout=seconds(7200))))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    gated.gate.set()
    rollout = (await waiting).rollout
    assert (rollout.state, rollout.outcome.stop.reason) == (pb.ROLLOUT_STATE_FINISHED, "stop")
    assert rollout.HasField("finish_time")


async def test_list_pages_newest_first_while_rollouts_start(caller: Caller) -> None:
    uids = [(await caller.start(start())).rollout.uid for _ in range(7)]
    listed: list[str] = []
    request = pb.ListRolloutsRequest(page_size=3)
    while True:
        page = await caller.stub.ListRollouts(request)
        listed += [rollout.uid for rollout in page.rollouts]
        await caller.start(start())
        if not page.next_page_token:
            break
        request.page_token = page.next_page_token
    assert listed == uids[::-1]


async def test_list_selects_by_every_condition(caller: Caller) -> None:
    a = (await caller.start(start(rollout_id="a", group_id="g", labels={"x": "1"}))).rollout.uid
    b = (await caller.start(start(rollout_id="b", group_id="g", agent="gated", labels={"x": "1", "y": ""}))).rollout.uid
    await caller.finished(a)

    async def listed(**conditions: Any) -> list[str]:
        request = pb.ListRolloutsRequest(selection=pb.Selection(**conditions))
        return [rollout.uid for rollout in (await caller.stub.ListRollouts(request)).rollouts]

    assert await listed() == await listed(all=True) == await listed(group_id="g") == [b, a]
    assert await listed(uids=[a, UNKNOWN, a]) == await listed(rollout_ids=["a"]) == await listed(agent="idle") == [a]
    assert await listed(states=[pb.ROLLOUT_STATE_RUNNING]) == await listed(labels={"x": "1", "y": ""}) == [b]
    assert await listed(group_id="g", rollout_ids=["c"]) == []


async def test_cancel_ends_the_selected_that_have_not_finished(caller: Caller) -> None:
    done = (await caller.play(start(group_id="g"))).uid
    running = (await caller.start(start(group_id="g", agent="gated"))).rollout.uid
    other = (await caller.start(start(agent="gated"))).rollout.uid
    request = pb.CancelRolloutsRequest(selection=pb.Selection(group_id="g"), reason="enough")
    assert list((await caller.stub.CancelRollouts(request)).uids) == [running]
    assert (await caller.finished(running)).outcome.cancellation.reason == "enough"
    assert (await caller.get(done)).outcome.stop.reason == "stop"
    assert (await caller.get(other)).state == pb.ROLLOUT_STATE_RUNNING
    everything = pb.CancelRolloutsRequest(selection=pb.Selection(all=True))
    assert list((await caller.stub.CancelRollouts(everything)).uids) == [other]
    assert (await caller.finished(other)).outcome.cancellation.reason == "cancelled"


async def test_tools_and_agents_are_told(caller: Caller) -> None:
    tools = (await caller.stub.ListTools(pb.ListToolsRequest(agent="calculator"))).tools
    assert [tool.name for tool in tools] == ["add", "subtract", "multiply", "divide"]
    assert not (await caller.stub.ListTools(pb.ListToolsRequest())).tools
    agents = (await caller.stub.ListAgents(pb.ListAgentsRequest())).agents
    assert [agent.name for agent in agents] == ["calculator", "gated", "idle", "measured"]
    assert [agent.name for agent in agents if agent.default] == ["idle"]
    assert {agent.name: agent.replayable for agent in agents}["calculator"]
    assert list(agents[0].tools) == list(tools)
    assert agents[2].description == "End at once, without a completion."


async def test_the_server_tells_what_it_is(open_server: OpenServer) -> None:
    caller = await open_server(Gated(), max_running=1, max_queued=3, max_seconds=90.5, max_request_bytes=1_000_000)
    await caller.start(start())
    uid = (await caller.start(start())).rollout.uid
    await caller.stub.CancelRollouts(pb.CancelRolloutsRequest(selection=pb.Selection(uids=[uid])))
    await caller.start(start())
    told = await caller.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert told.version == rollout_server.__version__
    assert "http_masked" in told.features
    assert (told.max_running, told.max_queued, told.max_request_bytes) == (1, 3, 1_000_000)
    assert (told.max_rollout_time, told.start_time.seconds > 0) == (seconds(90.5), True)
    assert (told.running, told.queued, told.finished, told.failed) == (1, 1, 1, 1)


async def test_the_server_counts_what_it_has_done(caller: Caller) -> None:
    before = await caller.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (before.finished, before.failed, before.turns, before.generated_tokens) == (0, 0, 0, 0)
    async with trainer_of(GrpcTrainer([7, 8])) as trainer:
        await caller.play(start(agent="calculator", completions=target(trainer.url)))
    await caller.play(start())
    failed = await caller.play(start(agent="calculator"))
    assert failed.outcome.HasField("failure")
    after = await caller.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (after.finished, after.failed, after.turns, after.generated_tokens) == (3, 1, 1, 2)


async def test_an_outcome_is_acknowledged_as_often_as_one_likes(caller: Caller, gated: Gated) -> None:
    uid = (await caller.start(start(agent="gated"))).rollout.uid
    request = pb.AcknowledgeOutcomeRequest(uid=uid)
    gated.gate.set()
    await caller.finished(uid)
    for _ in range(2):
        await caller.stub.AcknowledgeOutcome(request)
