"""Broken connections: no event is lost or repeated, and no rollout is started twice. Over real sockets."""

from __future__ import annotations

import asyncio

import pytest
from grpc import StatusCode
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1.group_pb2 import GroupResult
from rollout_client import AsyncClient, Client, NotFinished, NotFound, Retry, RolloutEvent, Unavailable
from rollout_server.app import Server

from tests.client.conftest import CALCULATOR_EVENTS, IMPATIENT, QUICK, ServerAndTrainer
from tests.client.scripted import UID, Held, Refusal, Stage, event, finished, ran, rollout, watched
from tests.support.agents import Idle
from tests.support.start_requests import settings
from tests.support.tcp_proxy import TcpProxy

ALL = list(range(1, CALCULATOR_EVENTS + 1))
SLOW = Retry(patience=20, first=0.01, longest=5)


def sequences(events: list[RolloutEvent]) -> list[int]:
    return [event.sequence for event in events]


async def bytes_of_a_run(world: ServerAndTrainer) -> int:
    """The number of bytes that a server sends for one run."""
    async with TcpProxy(world.port, [10**9]) as line, AsyncClient(line.address) as client:
        assert sequences([event async for event in client.run(**world.asked(), detail="messages")]) == ALL
        return line.forwarded


async def test_a_run_that_is_cut_at_any_byte(world: ServerAndTrainer, client: AsyncClient) -> None:
    whole = await bytes_of_a_run(world)
    budgets = range(1, whole, max(1, whole // 60))

    async def one(budget: int) -> int:
        name = f"r/{budget}"
        async with TcpProxy(world.port, [budget]) as line, AsyncClient(line.address, retry=QUICK) as far:
            run = far.run(**world.asked(rollout_id=name, request_id=name), detail="messages")
            assert sequences([event async for event in run]) == ALL
            assert [each.uid async for each in client.list(rollout_id=name)] == [run.uid]
            return line.connections

    connections = await asyncio.gather(*(one(budget) for budget in budgets))
    # The byte count varies slightly, so the last cuts may come too late.
    assert max(connections) == 2
    assert connections.count(2) > 0.8 * len(budgets)


async def test_a_connection_that_carries_a_few_bytes_only(world: ServerAndTrainer) -> None:
    """Each connection carries one or two events, then it breaks."""
    async with TcpProxy(world.port, [900] * 30) as line, AsyncClient(line.address, retry=QUICK) as far:
        assert sequences([event async for event in far.run(**world.asked())]) == ALL
        assert line.connections > 3


async def test_a_watch_that_is_cut_after_every_event(world: ServerAndTrainer, line: TcpProxy, far: AsyncClient) -> None:
    uid = (await far.start(**world.asked(agent="measured", metadata={"notes": 8}))).uid
    watching = far.watch(uid)
    seen = []
    while watching.outcome is None:
        seen.append((await anext(watching)).sequence)
        line.cut()
        world.measured.permits.release()
    assert seen == list(range(1, 11))
    assert line.connections >= 9  # the last two events arrive together


async def test_a_thread_that_is_cut_after_every_event(world: ServerAndTrainer, line: TcpProxy) -> None:
    loop = asyncio.get_running_loop()

    def play() -> list[int]:
        seen = []
        with Client(line.address, retry=QUICK) as client:
            for event in client.run(**world.asked(agent="measured", metadata={"notes": 8})):
                seen.append(event.sequence)
                loop.call_soon_threadsafe(line.cut)
                loop.call_soon_threadsafe(world.measured.permits.release)
        return seen

    assert await asyncio.to_thread(play) == list(range(1, 11))
    assert line.connections > 2


async def test_a_thread_that_is_cut_at_any_byte(world: ServerAndTrainer) -> None:
    whole = await bytes_of_a_run(world)

    def play(address: str, name: str) -> list[int]:
        with Client(address, retry=QUICK) as far:
            return sequences(list(far.run(**world.asked(rollout_id=name), detail="messages")))

    for budget in range(50, 9 * whole // 10, whole // 12):
        async with TcpProxy(world.port, [budget]) as line:
            assert await asyncio.to_thread(play, line.address, f"r/{budget}") == ALL
            assert line.connections == 2


async def test_a_start_whose_reply_is_lost_gives_one_rollout(world: ServerAndTrainer, client: AsyncClient) -> None:
    async with TcpProxy(world.port, [10**9]) as line, AsyncClient(line.address) as far:
        await far.start(**world.asked())
        whole = line.forwarded
    attached = 0
    for budget in range(1, whole, max(1, whole // 25)):
        name = f"r/{budget}"
        async with TcpProxy(world.port, [budget]) as line, AsyncClient(line.address, retry=QUICK) as far:
            started = await far.start(**world.asked(rollout_id=name, agent="gated"))
            assert [each.uid async for each in client.list(rollout_id=name)] == [started.uid]
            attached += started.attached
    assert attached > 0  # otherwise no response was lost


async def test_a_wait_that_is_cut(world: ServerAndTrainer, line: TcpProxy, far: AsyncClient) -> None:
    uid = (await far.start(**world.asked(agent="gated"))).uid
    waiting = asyncio.create_task(far.wait(uid))
    for _ in range(3):
        await asyncio.sleep(0.05)
        line.cut()
    world.gated.gate.set()
    assert (await waiting).state == pb.ROLLOUT_STATE_FINISHED
    assert line.connections > 2


async def test_the_server_is_away_for_a_while(world: ServerAndTrainer, line: TcpProxy, far: AsyncClient) -> None:
    uid = (await far.start(**world.asked(agent="gated"))).uid
    watching = far.watch(uid)
    first = await anext(watching)
    waiting = asyncio.create_task(far.wait(uid))
    reading = asyncio.create_task(anext(watching))
    await line.down()
    asking = asyncio.create_task(far.get(uid))
    await asyncio.sleep(0.5)
    assert not any(task.done() for task in (waiting, reading, asking))
    world.gated.gate.set()
    await line.mend()
    assert (first.sequence, (await reading).sequence) == (1, 2)
    assert (await waiting).uid == (await asking).uid == uid


async def test_a_server_that_stays_away_is_given_up(world: ServerAndTrainer, line: TcpProxy) -> None:
    async with AsyncClient(line.address, retry=IMPATIENT) as far:
        uid = (await far.start(**world.asked(agent="gated"))).uid
        watching = far.watch(uid)
        await anext(watching)
        await line.down()
        for call in (anext(watching), far.wait(uid), far.get(uid), far.start(**world.asked())):
            with pytest.raises(Unavailable) as caught:
                await call
            assert caught.value.attempts > 1
        with pytest.raises(StopAsyncIteration):
            await anext(watching)
        with pytest.raises(NotFinished) as late:
            await far.wait(uid, timeout=0.1)
        assert late.value.rollout is None


async def test_a_server_that_forgot_the_rollout_says_so_and_starts_no_other(world: ServerAndTrainer) -> None:
    async with TcpProxy(world.port) as line, AsyncClient(line.address, retry=SLOW) as far:
        run = far.run(**world.asked(agent="gated", request_id="one"))
        await anext(run)
        async with Server([Idle()], settings()) as another:
            line.forward(another.grpc_port)
            line.cut()
            with pytest.raises(NotFound, match=run.uid):
                await anext(run)
            assert (await far.server_info()).finished == 0


async def test_each_way_to_break_a_stream(stage: Stage, actor: AsyncClient) -> None:
    cuts = [
        Refusal(code, "RST_STREAM", reason="")
        for code in (StatusCode.UNAVAILABLE, StatusCode.INTERNAL, StatusCode.UNKNOWN, StatusCode.CANCELLED)
    ]
    draining = Refusal(StatusCode.UNAVAILABLE, "stopping", reason="DRAINING", retry_after=0.01)
    stage.script.says(
        "WatchRollout",
        [*watched(event(1), event(2)), cuts[0]],
        [*watched(event(3)), cuts[1]],
        [cuts[2]],
        [*watched(event(4)), cuts[3]],
        [draining],
        # A server that repeats an event.
        watched(event(3), event(4), event(5), finished(6)),
    )
    stage.script.says("RunRollout", [cuts[0]], [draining], [cuts[1]], [*ran(), cuts[3]])
    watching = actor.watch(UID)
    assert sequences([each async for each in watching]) == [1, 2, 3, 4, 5, 6]
    assert [each.after_sequence for each in stage.script.asked("WatchRollout")] == [0, 2, 3, 3, 4, 4]
    run = actor.run(messages=[], completions="http://t")
    assert (await run.started()).uid == UID
    assert len({each.start.request_id for each in stage.script.asked("RunRollout")}) == 1
    assert len(stage.script.asked("RunRollout")) == 4
    assert sequences([each async for each in run]) == [3, 4, 5, 6]
    assert {call.metadata["x-request-id"] for call in stage.script.seen if call.rpc == "WatchRollout"} != {""}


async def test_after_finished_nothing_more_is_read(stage: Stage, actor: AsyncClient) -> None:
    held = Held()
    stage.script.says("WatchRollout", [*watched(event(1), finished(2)), held])
    assert sequences([each async for each in actor.watch(UID)]) == [1, 2]
    await held.left.wait()
    assert len(stage.script.seen) == 1


async def test_events_without_a_number_come_as_they_come(stage: Stage, actor: AsyncClient) -> None:
    cut = Refusal(StatusCode.UNAVAILABLE, "cut", reason="")
    stage.script.says("WatchRollout", [*watched(event(1), event(0), event(0)), cut], watched(event(0), finished(2)))
    assert sequences([each async for each in actor.watch(UID)]) == [1, 0, 0, 0, 2]
    assert stage.script.asked("WatchRollout")[1].after_sequence == 1


async def test_a_stream_that_ends_too_early_goes_on(stage: Stage, actor: AsyncClient) -> None:
    stage.script.says("WatchRollout", watched(event(1)), watched(), watched(finished(2)))
    assert sequences([each async for each in actor.watch(UID)]) == [1, 2]
    stage.script.says("WatchRollout", watched(event(1)), watched())
    stage.script.says("RunRollout", [])
    for stream in (actor.watch(UID), actor.run(messages=[], completions="http://t")):
        with pytest.raises(Unavailable, match="before the rollout had finished"):
            assert [each async for each in stream] == []


async def test_a_stream_that_ends_before_its_first_event_goes_on(stage: Stage, actor: AsyncClient) -> None:
    """Only after an event can a stream without any be complete."""
    stage.script.says("WatchRollout", watched(), watched(event(1), finished(2)), watched(finished(1)), watched())
    stage.script.says("RunRollout", ran())
    stage.script.says("WatchGroup", [], [pb.WatchGroupResponse(sequence=1, result=GroupResult(usable=1))], [])
    assert sequences([each async for each in actor.watch(UID)]) == [1, 2]
    run, group = actor.run(messages=[], completions="http://t"), actor.watch_group("g")
    assert sequences([each async for each in run]) == [1]
    assert run.outcome is not None
    assert [each async for each in group] == []
    assert group.result is not None
    assert [each async for each in actor.watch(UID, after_sequence=1)] == []
    assert [each async for each in actor.watch_group("g", after_sequence=1)] == []


async def test_a_server_that_breaks_every_stream_is_given_up(stage: Stage, actor: AsyncClient) -> None:
    """A response alone is not progress, so the client gives up."""
    stage.script.says("WatchRollout", [Refusal(StatusCode.UNAVAILABLE, "cut", reason="")])
    with pytest.raises(Unavailable):
        await anext(actor.watch(UID))
    assert len(stage.script.seen) > 2


async def test_a_wait_polls_until_it_is_over(stage: Stage, actor: AsyncClient) -> None:
    running = pb.WaitRolloutResponse(rollout=rollout(pb.ROLLOUT_STATE_RUNNING))
    cut = Refusal(StatusCode.INTERNAL, "RST_STREAM", reason="")
    stage.script.says("WaitRollout", running, cut, running, pb.WaitRolloutResponse(rollout=rollout()))
    assert (await actor.wait(UID, view="samples")).state == pb.ROLLOUT_STATE_FINISHED
    polls = stage.script.asked("WaitRollout")
    assert [poll.timeout.seconds for poll in polls] == [30, 30, 1, 2]
    assert {poll.view for poll in polls} == {pb.ROLLOUT_VIEW_SAMPLES}
