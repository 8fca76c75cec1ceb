"""A stream whose connection breaks: at every item, for too long, and while another connection takes over."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from osmosis.rollout.v1 import outcome_pb2, spec_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as rpb
from osmosis.rollout.v1 import trainer_service_pb2 as pb

from tests.edge.stream.conftest import TURNS, OpenPlace, StreamServer
from tests.edge.stream.trainer import FULL, Line, Trainer, kind, start
from tests.support.server_client import Refusal, until

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def whole(place: StreamServer, cut_after: int = 0, *, loses: bool = False) -> Trainer:
    """A whole rollout with one cut."""
    trainer = place.trainer(detail=FULL)
    trainer.cut_after, trainer.loses = cut_after, loses
    await trainer.put(start=start(f"r{cut_after}{loses}"))
    await trainer.until(lambda t: bool(t.outcomes))
    return trainer


@pytest.mark.parametrize("loses", [False, True])
async def test_cut_at_every_item_it_goes_on_without_losing_or_repeating(place: StreamServer, loses: bool) -> None:
    """`loses`: the server's item at which the connection breaks is not delivered."""
    uncut = await whole(place, loses=loses)
    assert uncut.on_wire > 4 * TURNS
    samples = uncut.outcomes[0].outcome.samples
    for number in range(1, uncut.on_wire + 1):
        trainer = await whole(place, number, loses=loses)
        assert trainer.connections == 2 or trainer.outcomes
        (rollout,) = trainer.outcomes
        assert rollout.outcome.samples == samples, number
        assert [warning.code for warning in rollout.outcome.warnings] == []
        assert list(trainer.generated.values()) == [1] * TURNS, number
        assert {r.uid for r in trainer.started} == {rollout.uid}
        told = {item.event.sequence for item in trainer.events}
        assert told == set(range(1, rollout.last_sequence + 1))
        trainer.cut()


async def test_after_the_grace_time_the_stream_is_gone_and_its_rollouts_fail_when_they_ask(
    open_place: OpenPlace,
) -> None:
    place = await open_place(stream_grace_seconds=0.05)
    trainer = place.trainer()
    trainer.automatic = False
    await trainer.put(start=start("asks"))
    await trainer.put(start=start("will ask", agent="held"))
    await trainer.until(lambda t: len(t.asks) == 1 and len(t.started) == 2)
    asks, will_ask = [rollout.uid for rollout in trainer.started]
    trainer.cut()
    first = await place.finished(asks)
    place.held.gate.set()
    for rollout in (first, await place.finished(will_ask)):
        assert rollout.outcome.failure.category == outcome_pb2.FAILURE_CATEGORY_NETWORK
        assert (
            "turn 1: the trainer's stream was disconnected and not resumed within 0.05 s"
            in rollout.outcome.failure.message
        )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await trainer.connect()
    refusal = Refusal.of(caught.value)
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "STREAM_EXPIRED")


async def test_a_newer_connection_takes_the_stream_over(place: StreamServer) -> None:
    trainer = place.trainer()
    trainer.automatic = False
    await trainer.put(start=start("r"))
    await trainer.until(lambda t: len(t.asks) == 1)
    older = trainer.line
    assert older is not None
    await trainer.connect()
    refusal = Refusal.of(await older.refused())
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.ABORTED, "STREAM_TAKEN")
    trainer.automatic = True
    await trainer.complete(trainer.asks[0])
    await trainer.until(lambda t: bool(t.outcomes))
    assert list(trainer.generated.values()) == [1] * TURNS


async def test_an_ask_that_means_nothing_any_more_comes_without_content(place: StreamServer) -> None:
    trainer = place.trainer()
    trainer.automatic = False
    await trainer.put(start=start("r"))
    await trainer.until(lambda t: len(t.started) == 1)
    seen = trainer.seen
    await trainer.until(lambda t: len(t.asks) == 1)
    trainer.cut()
    trainer.seen = seen  # the completion request did not arrive
    uid = trainer.started[0].uid
    await place.stub.CancelRollouts(rpb.CancelRolloutsRequest(selection=rpb.Selection(uids=[uid])))
    await place.finished(uid)
    trainer.items.clear()
    await trainer.until(lambda t: bool(t.outcomes))
    assert [kind(item) for item in trainer.items if item.sequence] == [None, "outcome"]


async def test_another_stream_takes_a_rollout_over_and_the_log_says_what_may_have_come_twice(
    place: StreamServer,
) -> None:
    former = place.trainer()
    former.automatic = False
    await former.put(start=start("r", request_id="k"))
    await former.until(lambda t: len(t.asks) == 1)
    other = place.trainer()
    await other.put(start=start("r", request_id="k"))
    await other.until(lambda t: bool(t.refused))  # the first stream is still connected
    assert other.refused[0].code == grpc.StatusCode.FAILED_PRECONDITION.value[0]
    former.cut()
    while not other.started:
        await other.put(start=start("r", request_id="k"))
        await other.until(lambda t: len(t.refused) + len(t.started) == t.sent)
    await other.until(lambda t: bool(t.outcomes))
    assert other.outcomes[0].uid == former.started[0].uid
    assert [warning.code for warning in other.outcomes[0].outcome.warnings] == ["resampled"]
    before = len(former.items)
    await former.connect()
    await former.put(start=start("another", count=1))
    await former.until(lambda t: len(t.started) == 2)
    assert [kind(i) for i in former.items[before:] if i.sequence] == ["started"]


async def test_a_half_close_cancels_what_runs_and_tells_all_outcomes(place: StreamServer) -> None:
    trainer = place.trainer()
    trainer.automatic = False
    await trainer.put(start=start("r", count=3))
    await trainer.until(lambda t: len(t.asks) == 3)
    assert trainer.line is not None
    await trainer.line.call.done_writing()
    while (item := await trainer.line.read()) is not None:
        if kind(item) == "outcome":
            trainer.outcomes.append(item.outcome.rollout)
    assert len(trainer.outcomes) == 3
    assert {r.outcome.cancellation.reason for r in trainer.outcomes} == {"the trainer closed its stream"}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await trainer.connect()
    assert Refusal.of(caught.value).reason == "STREAM_EXPIRED"


async def test_what_follows_a_group_waits_until_it_is_started_whichever_connection_brings_it(
    place: StreamServer,
) -> None:
    trainer = place.trainer()
    await trainer.connect()
    await trainer.put(start=start("g", count=400, agent="held"))
    await asyncio.sleep(0.02)
    trainer.cut()
    await trainer.put(cancel=rpb.CancelRolloutsRequest(selection=rpb.Selection(all=True), reason="all"))
    await trainer.until(lambda t: len(t.outcomes) == 400)
    assert {rollout.outcome.cancellation.reason for rollout in trainer.outcomes} == {"all"}
    assert len({rollout.uid for rollout in trainer.started}) == 400


async def test_nobody_is_attached_to_the_rollouts_of_a_cut_stream(place: StreamServer) -> None:
    trainer = place.trainer()
    spec = start("r", agent="held")
    spec.rollout.spec.cancel_after_detach.FromMilliseconds(1)
    await trainer.put(start=spec)
    await trainer.until(lambda t: len(t.started) == 1)
    await asyncio.sleep(0.02)
    uid = trainer.started[0].uid
    assert (await place.get(uid)).state == rpb.ROLLOUT_STATE_RUNNING
    trainer.cut()

    async def has_ended() -> bool:  # WaitRollout would attach
        return (await place.get(uid)).state == rpb.ROLLOUT_STATE_FINISHED

    await until(has_ended)
    shown = await place.get(uid)
    assert shown.outcome.cancellation.reason == "detached"
    await trainer.until(lambda t: bool(t.outcomes))


async def test_a_drain_lets_rollouts_finish_refuses_others_and_then_ends_the_stream(open_place: OpenPlace) -> None:
    place = await open_place(drain_seconds=30)
    trainer = place.trainer()
    trainer.automatic = False
    await trainer.put(start=start("r"))
    await trainer.until(lambda t: len(t.asks) == 1)
    draining = asyncio.create_task(place.server.drain())
    while not trainer.refused:
        await trainer.put(start=start("too late", agent="held"))
        await trainer.until(lambda t: len(t.started) + len(t.refused) == t.sent)
    assert trainer.refused[0].code == grpc.StatusCode.UNAVAILABLE.value[0]
    place.held.gate.set()
    trainer.cut()
    trainer.automatic = True
    for ask in trainer.asks:
        await trainer.complete(ask)  # sent on the next connection
    await trainer.until(lambda t: len(t.outcomes) == len(t.started))
    assert {r.outcome.stop.reason for r in trainer.outcomes} == {"stop"}
    assert trainer.line is not None
    refusal = Refusal.of(await trainer.line.refused())
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    await draining
    late = Refusal.of(await _hello(place))
    assert late.code == grpc.StatusCode.UNAVAILABLE


async def _hello(place: StreamServer) -> grpc.aio.AioRpcError:
    line = Line(place.channel)
    await line.send(hello=pb.TrainHello(credit=1))
    return await line.refused()


async def test_no_other_rpc_takes_the_dialect_of_streams(place: StreamServer) -> None:
    spec = start("r").rollout.spec
    spec.completions.dialect = spec_pb2.DIALECT_STREAM
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await place.stub.StartRollout(rpb.StartRolloutRequest(spec=spec))
    refusal = Refusal.of(caught.value)
    assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
    assert "must not be STREAM" in refusal.fields["spec.completions.dialect"]
