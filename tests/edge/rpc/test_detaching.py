"""A disconnected client detaches (D6): what happens to a rollout when its last client leaves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from osmosis.rollout.v1 import rollout_service_pb2 as pb

from tests.support.agents import Gated
from tests.support.server_client import Caller, Stream, first
from tests.support.start_requests import seconds, start


def held(request_id: str = "id", *, grace: float | None) -> pb.StartRolloutRequest:
    """A rollout that waits at a gate; `grace` is its cancel_after_detach."""
    return start(request_id, agent="gated", cancel_after_detach=None if grace is None else seconds(grace))


async def run(caller: Caller, request: pb.StartRolloutRequest, **call: Any) -> tuple[str, Stream]:
    """Attach through RunRollout and read the first event."""
    stream = caller.stub.RunRollout(pb.RunRolloutRequest(start=request), **call)
    items = await first(stream, 2)
    return items[0].started.rollout.uid, stream


async def detached(caller: Caller, uid: str) -> bool:
    """Whether the rollout was cancelled because no client was attached."""
    return (await caller.ended(uid)).outcome.cancellation.reason == "detached"


async def test_without_a_grace_a_rollout_goes_on_alone(caller: Caller, gated: Gated) -> None:
    uid, stream = await run(caller, held(grace=None))
    stream.cancel()
    await asyncio.sleep(0.1)
    assert (await caller.get(uid)).state == pb.ROLLOUT_STATE_RUNNING
    gated.gate.set()
    assert (await caller.ended(uid)).outcome.stop.reason == "stop"


async def test_with_a_grace_of_zero_it_is_cancelled_at_once(caller: Caller) -> None:
    uid, stream = await run(caller, held(grace=0))
    stream.cancel()
    assert await detached(caller, uid)


async def test_a_deadline_leaves_like_a_cancel(caller: Caller) -> None:
    uid, _ = await run(caller, held(grace=0), timeout=0.5)
    assert await detached(caller, uid)


async def test_a_rollout_that_nobody_ever_attached_to_is_cancelled(caller: Caller) -> None:
    assert await detached(caller, (await caller.start(held(grace=0))).rollout.uid)
    assert await detached(caller, (await caller.start(held("other", grace=0.05))).rollout.uid)


async def test_it_survives_its_grace_where_somebody_comes_back(caller: Caller, gated: Gated) -> None:
    request = held(grace=1.0)
    uid, stream = await run(caller, request)
    stream.cancel()
    again, stream = await run(caller, request)
    assert again == uid
    await asyncio.sleep(1.3)
    assert (await caller.get(uid)).state == pb.ROLLOUT_STATE_RUNNING
    gated.gate.set()
    assert [item async for item in stream][-1].event.finished.outcome.stop.reason == "stop"


async def test_it_does_not_survive_its_grace_alone(caller: Caller) -> None:
    uid, stream = await run(caller, held(grace=0.1))
    stream.cancel()
    assert await detached(caller, uid)


@pytest.mark.parametrize("stays", ["watch", "run", "wait"])
async def test_one_who_stays_is_enough(caller: Caller, gated: Gated, stays: str) -> None:
    request = held(grace=0)
    uid, leaving = await run(caller, request)
    staying: Any
    if stays == "run":
        _, staying = await run(caller, request)
    elif stays == "watch":
        staying = caller.watch(uid)
        await first(staying, 1)
    else:
        staying = asyncio.create_task(caller.finished(uid))
        await asyncio.sleep(0.2)
    leaving.cancel()
    await asyncio.sleep(0.1)
    assert (await caller.get(uid)).state == pb.ROLLOUT_STATE_RUNNING
    if stays == "wait":
        gated.gate.set()
        assert (await staying).outcome.stop.reason == "stop"
    else:
        staying.cancel()
        assert await detached(caller, uid)


async def test_the_one_who_asked_first_may_leave_first_and_events_stay(caller: Caller) -> None:
    uid, stream = await run(caller, held(grace=0))
    watching = asyncio.create_task(caller.events(uid))
    other = caller.watch(uid)
    await first(other, 1)
    stream.cancel()
    await caller.stub.CancelRollouts(pb.CancelRolloutsRequest(selection=pb.Selection(uids=[uid]), reason="told"))
    events = await watching
    assert events[-1].finished.outcome.cancellation.reason == "told"


async def test_a_finished_rollout_stays_as_it_is(caller: Caller) -> None:
    request = start("id", cancel_after_detach=seconds(0))
    items = [item async for item in caller.stub.RunRollout(pb.RunRolloutRequest(start=request))]
    outcome = items[-1].event.finished.outcome
    uid = items[0].started.rollout.uid
    for _ in range(3):
        await caller.events(uid)
    assert (await caller.get(uid)).outcome == outcome
    assert outcome.stop.reason == "stop"
