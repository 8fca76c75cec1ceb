"""Event streams: order, numbers without gaps, resuming, deadlines."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from osmosis.rollout.v1 import event_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_server.testing.trainer import StrictTrainer

from tests.edge.rpc.conftest import OpenServer
from tests.support.agents import Gated, Measured, Urging
from tests.support.server_client import DETAILS, Caller, Stream, first, kinds, refusal
from tests.support.start_requests import metadata, seconds, start, target

TWO_TURNS = [
    "accepted",
    "asked",
    "segment_opened",
    "answered",
    "tool_started",
    "tool_returned",
    "asked",
    "answered",
    "tool_started",
    "tool_returned",
    "asked",
    "answered",
    "finished",
]


def calculation(trainer: StrictTrainer, request_id: str = "") -> pb.StartRolloutRequest:
    """Three completions, two of which call a tool."""
    return start(request_id, agent="calculator", completions=target(trainer.url), rollout_id=request_id or "r")


async def next_note(permits: asyncio.Semaphore, *watching: Stream) -> list[event_pb2.RolloutEvent]:
    """The next event of the streams after the agent may write one more note."""
    permits.release()
    return [(await anext(stream.__aiter__())).event for stream in watching]


async def test_a_rollout_is_told_in_order(caller: Caller, trainer: StrictTrainer) -> None:
    uid = (await caller.start(calculation(trainer))).rollout.uid
    events = await caller.events(uid)
    assert kinds(events) == TWO_TURNS
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    times = [event.time.ToNanoseconds() for event in events]
    assert times == sorted(times)
    rollout = await caller.get(uid)
    assert rollout.last_sequence == len(events)
    assert rollout.create_time.ToNanoseconds() <= times[0]
    assert rollout.finish_time.ToNanoseconds() == times[-1]
    assert [event.asked.turn_key for event in events if event.WhichOneof("event") == "asked"] == [
        f"{uid}/0/{turn}" for turn in (1, 2, 3)
    ]
    assert [event.turn for event in events] == [0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3]
    opened = TWO_TURNS.index("segment_opened")
    assert {event.segment_id for event in events[opened:]} == {"0"}


async def test_messages_of_an_agent_belong_to_a_turn(open_server: OpenServer) -> None:
    caller = await open_server(Urging())
    async with StrictTrainer() as trainer:
        events = await caller.events((await caller.start(start(completions=target(trainer.url)))).rollout.uid)
    assert kinds(events) == ["accepted", "asked", "segment_opened", "answered", "appended", "asked", *kinds(events)[6:]]
    assert (events[4].appended.count, events[4].turn, events[4].segment_id) == (1, 1, "0")
    turns = [event.turn for event in events]
    assert turns == sorted(turns)


async def test_events_come_as_they_happen(caller: Caller, measured: Measured) -> None:
    uid = (await caller.start(start(agent="measured", metadata_json=metadata(notes=3)))).rollout.uid
    watching = caller.watch(uid)
    assert kinds(item.event for item in await first(watching, 1)) == ["accepted"]
    for number in range(3):
        assert (await caller.get(uid)).last_sequence == 1 + number
        [event] = await next_note(measured.permits, watching)
        assert (event.sequence, event.note.text) == (2 + number, str(number))
    assert kinds([item.event async for item in watching]) == ["finished"]
    assert await watching.code() is grpc.StatusCode.OK


async def test_many_watchers_see_the_same(caller: Caller, trainer: StrictTrainer) -> None:
    uid = (await caller.start(calculation(trainer))).rollout.uid
    seen = await asyncio.gather(*(caller.events(uid, detail=DETAILS[n % 3]) for n in range(60)))
    for detail in range(3):
        assert seen[detail] == await caller.events(uid, detail=DETAILS[detail])
        assert all(events == seen[detail] for events in seen[detail::3])


async def test_watchers_of_a_live_rollout_each_see_all_of_it(caller: Caller, measured: Measured) -> None:
    uid = (await caller.start(start(agent="measured", metadata_json=metadata(notes=20)))).rollout.uid
    watching = []
    for _ in range(20):
        watching.append(asyncio.create_task(caller.events(uid)))
        measured.permits.release()
        await asyncio.sleep(0)
    whole = await caller.events(uid)
    assert [event.sequence for event in whole] == list(range(1, 23))
    assert all(events == whole for events in await asyncio.gather(*watching))


async def test_a_stream_cut_anywhere_goes_on_where_it_was(caller: Caller, trainer: StrictTrainer) -> None:
    for position in range(len(TWO_TURNS) + 1):
        request = calculation(trainer, f"cut-{position}")
        running = caller.stub.RunRollout(pb.RunRolloutRequest(start=request))
        items = await first(running, 1 + position)
        running.cancel()
        uid, seen = items[0].started.rollout.uid, [item.event for item in items[1:]]
        assert [event.sequence for event in seen] == list(range(1, position + 1))
        watched = await caller.events(uid, after=position)
        again = caller.stub.RunRollout(pb.RunRolloutRequest(start=request, after_sequence=position))
        answer, *rest = [item async for item in again]
        assert (answer.started.attached, answer.started.rollout.uid) == (True, uid)
        assert seen + watched == seen + [item.event for item in rest] == await caller.events(uid)
        assert kinds(seen + watched) == TWO_TURNS


async def test_a_watch_cut_at_every_event_misses_nothing_and_repeats_nothing(
    caller: Caller, trainer: StrictTrainer
) -> None:
    uid = (await caller.start(calculation(trainer))).rollout.uid
    seen: list[event_pb2.RolloutEvent] = []
    while not seen or seen[-1].WhichOneof("event") != "finished":
        watching = caller.watch(uid, after=len(seen), detail=event_pb2.EVENT_DETAIL_FULL)
        seen += [item.event for item in await first(watching, 1)]
        watching.cancel()
    assert seen == await caller.events(uid, detail=event_pb2.EVENT_DETAIL_FULL)


async def test_after_the_last_event_there_is_none(caller: Caller) -> None:
    uid = (await caller.play(start())).uid
    assert await caller.events(uid, after=2) == []


@pytest.mark.parametrize("beyond", [3, 1000, 2**64 - 1])
async def test_beyond_the_last_event_is_out_of_range(caller: Caller, beyond: int) -> None:
    uid = (await caller.play(start("id"))).uid
    again = pb.RunRolloutRequest(start=start("id"), after_sequence=beyond)
    for call in (caller.watch(uid, after=beyond).read(), first(caller.stub.RunRollout(again), 2)):
        refused = await refusal(call)
        assert (refused.code, refused.reason) == (grpc.StatusCode.OUT_OF_RANGE, "EVENTS_GONE")
        assert (refused.metadata["oldest"], refused.metadata["newest"]) == ("1", "2")
        assert refused.metadata["request_id"] == refused.request_id


async def test_a_deadline_ends_the_stream_and_not_the_rollout(caller: Caller, gated: Gated) -> None:
    request = start("id", agent="gated")
    uid = (await caller.start(request)).rollout.uid
    for stream in (
        caller.watch(uid, timeout=0.2),
        caller.stub.RunRollout(pb.RunRolloutRequest(start=request), timeout=0.2),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stream:
                pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert (await caller.get(uid)).state == pb.ROLLOUT_STATE_RUNNING
    gated.gate.set()
    assert (await caller.finished(uid)).outcome.stop.reason == "stop"


async def test_a_wait_answers_before_its_deadline(caller: Caller, gated: Gated) -> None:
    uid = (await caller.start(start(agent="gated"))).rollout.uid
    requests = (pb.WaitRolloutRequest(uid=uid), pb.WaitRolloutRequest(uid=uid, timeout=seconds(60)))
    for waited in await asyncio.gather(*(caller.stub.WaitRollout(request, timeout=2) for request in requests)):
        assert waited.rollout.state == pb.ROLLOUT_STATE_RUNNING
    gated.gate.set()
    assert (await caller.finished(uid)).outcome.stop.reason == "stop"


async def test_a_cancelled_wait_leaves_the_rollout_alone(caller: Caller, gated: Gated) -> None:
    uid = (await caller.start(start(agent="gated"))).rollout.uid
    waiting = asyncio.ensure_future(caller.stub.WaitRollout(pb.WaitRolloutRequest(uid=uid)))
    await asyncio.sleep(0.05)
    assert waiting.cancel()
    gated.gate.set()
    assert (await caller.finished(uid)).outcome.stop.reason == "stop"


async def test_a_rollout_in_the_queue_is_followed_from_there(open_server: OpenServer, gated: Gated) -> None:
    caller = await open_server(gated, max_running=1)
    await caller.start(start())
    uid = (await caller.start(start())).rollout.uid
    assert (await caller.get(uid)).state == pb.ROLLOUT_STATE_QUEUED
    watching = asyncio.create_task(caller.events(uid))
    await asyncio.sleep(0)
    gated.gate.set()
    assert kinds(await watching) == ["accepted", "finished"]
    assert (await caller.get(uid)).metrics.queued_ms > 0
