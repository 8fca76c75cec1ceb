"""Policies that trainers announce on their streams: pauses, steps in requests, refusals, and what a reconnection repeats."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from osmosis.rollout.v1 import completion_service_pb2 as cpb
from osmosis.rollout.v1 import rollout_service_pb2 as rpb
from osmosis.rollout.v1 import spec_pb2, token_pb2
from osmosis.rollout.v1 import trainer_service_pb2 as pb

from tests.edge.stream.conftest import TURNS, OpenPlace, StreamServer
from tests.edge.stream.test_idle import look_around
from tests.edge.stream.trainer import Book, Line, Trainer, kind, start

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def announce(trainer: Trainer, **update: object) -> None:
    """Announce a policy, and wait until the server has processed it."""
    number = await trainer.put(policy=spec_pb2.PolicyUpdate(**update))  # type: ignore[arg-type]
    await trainer.until(lambda t: all(kept.sequence > number for kept in t.kept))


async def play(trainer: Trainer, name: str) -> None:
    """Run a rollout of the default agent to its end."""
    before = len(trainer.outcomes)
    await trainer.put(start=start(name))
    await trainer.until(lambda t: len(t.outcomes) > before)


async def test_nothing_is_requested_during_a_pause_and_all_go_on_after_it(place: StreamServer) -> None:
    trainer, other = place.trainer(), place.trainer()
    trainer.automatic = False
    await trainer.put(start=start("a", count=3))
    await trainer.until(lambda t: len(t.asks) == 3)
    await announce(trainer, paused=True, step=1, version="one")
    for ask in trainer.asks[:2]:  # their next turns wait
        await trainer.complete(ask)
    await trainer.put(start=start("b", count=2))  # all of their turns wait
    await trainer.until(lambda t: len(t.started) == 5)
    await play(other, "another stream")  # is not paused, and meanwhile the server had all the time that it needs
    await trainer.complete(trainer.asks[2])
    await look_around(place.channel)
    await announce(trainer, paused=True)
    assert len(trainer.asks) == 3
    assert not trainer.asks[0].HasField("policy_step")
    trainer.automatic = True
    await announce(trainer, step=2)
    await trainer.until(lambda t: len(t.outcomes) == 5)
    assert {each.outcome.stop.reason for each in trainer.outcomes} == {"stop"}
    assert len(trainer.asks) == len(trainer.generated) == 5 * TURNS  # nothing is lost, nothing is generated twice
    assert {ask.policy_step for ask in trainer.asks[3:]} == {2}
    assert not any(ask.HasField("policy_step") for ask in other.asks)


async def test_requests_that_wait_for_credit_are_not_sent_during_a_pause(place: StreamServer) -> None:
    trainer = place.trainer(credit=1)
    trainer.automatic = False
    await trainer.put(start=start("a", count=3))
    await trainer.until(lambda t: len(t.asks) == 1)
    await play(place.trainer(), "another stream")  # by now, the other two rollouts wait for credit
    await announce(trainer, paused=True)
    await trainer.complete(trainer.asks[0])
    await look_around(place.channel)
    await announce(trainer, paused=True, step=1)
    assert len(trainer.asks) == 1
    trainer.automatic = True
    await announce(trainer, step=2)
    await trainer.until(lambda t: len(t.outcomes) == 3)
    assert {ask.policy_step for ask in trainer.asks[1:]} == {2}
    assert len(trainer.generated) == len(trainer.asks) == 3 * TURNS


async def test_a_refused_turn_is_not_requested_again_during_a_pause(open_place: OpenPlace) -> None:
    place = await open_place(retry_after_seconds=1.0)
    trainer = place.trainer()
    trainer.automatic = False
    await trainer.put(start=start("a"))
    await trainer.until(lambda t: len(t.asks) == 1)
    soon = Duration(nanos=1000)
    await trainer.reject(trainer.asks[0], grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after=soon)
    await trainer.until(lambda t: len(t.asks) == 2)
    await announce(trainer, paused=True)
    await trainer.reject(trainer.asks[1], grpc.StatusCode.UNAVAILABLE, retry_after=soon)
    await play(place.trainer(), "another stream")
    await asyncio.sleep(1.1)  # longer than refused turns are repeated, but the trainer could not be asked
    await announce(trainer, paused=True)
    assert len(trainer.asks) == 2
    await announce(trainer)
    await trainer.until(lambda t: len(t.asks) == 3)
    await trainer.reject(trainer.asks[2], grpc.StatusCode.UNAVAILABLE, retry_after=soon)
    trainer.automatic = True
    await trainer.until(lambda t: bool(t.outcomes))
    assert [ask.turn_key for ask in trainer.asks[:4]] == [trainer.asks[0].turn_key] * 4
    assert trainer.outcomes[0].outcome.stop.reason == "stop"


async def test_a_paused_stream_with_a_pending_request_is_idle(place: StreamServer) -> None:
    trainer = place.trainer(idle=True)
    trainer.automatic = False
    await trainer.put(start=start("busy", agent="held"))  # waits for its gate, and is not idle
    await trainer.put(start=start("a", count=2))
    await trainer.until(lambda t: len(t.asks) == 2)
    await trainer.put(policy=spec_pb2.PolicyUpdate(paused=True))
    await trainer.until(lambda t: kind(t.items[-1]) == "idle")
    assert not trainer.kept  # what the trainer sent is acknowledged before
    await trainer.complete(trainer.asks[0])
    await trainer.until(lambda t: kind(t.items[-1]) == "idle" and not t.kept)
    await trainer.put(policy=spec_pb2.PolicyUpdate())
    await trainer.until(lambda t: len(t.asks) == 3)
    await look_around(place.channel)
    assert [kind(item) for item in trainer.items].count("idle") == 2


async def test_announcements_and_pauses_outlive_a_connection(place: StreamServer) -> None:
    trainer = place.trainer()
    trainer.automatic = False
    await trainer.put(start=start("a", count=2))
    await trainer.until(lambda t: len(t.asks) == 2)
    await announce(trainer, paused=True, step=3)
    await trainer.complete(trainer.asks[0])
    trainer.cut()
    other = place.trainer()
    await play(other, "another stream")
    await announce(trainer, paused=True)  # reconnects
    assert {ask.turn_key for ask in trainer.asks} == {ask.turn_key for ask in trainer.asks[:2]}
    trainer.cut()
    trainer.automatic = True
    await trainer.put(policy=spec_pb2.PolicyUpdate())  # sent with the next connection
    await trainer.complete(trainer.asks[1])
    await trainer.until(lambda t: len(t.outcomes) == 2)
    assert {ask.policy_step for ask in trainer.asks[-2:]} == {3}
    assert set(trainer.generated.values()) == {1}


@pytest.mark.parametrize("cut_after", [4, 7, 8, 11, 15])
@pytest.mark.parametrize("loses", [False, True])
async def test_an_update_takes_effect_once_wherever_the_connection_breaks(
    place: StreamServer, cut_after: int, loses: bool
) -> None:
    trainer = place.trainer()
    trainer.cut_after, trainer.loses = cut_after, loses
    for step in (1, 2, 3):  # repeated, an earlier step would be refused
        await trainer.put(policy=spec_pb2.PolicyUpdate(step=step, paused=step < 3))
    await trainer.put(start=start("a"))
    await trainer.until(lambda t: bool(t.outcomes))
    assert trainer.connections == 2
    assert not trainer.refused
    assert {ask.policy_step for ask in trainer.asks} == {3}


@pytest.mark.parametrize(
    "update",
    [
        {"step": -1},
        {"step": 4},
        {"step": -(2**63), "paused": True},
        {"version": "v" * 257},
        {"version": "a\nb", "step": 9},
    ],
)
async def test_an_invalid_update_is_refused_and_has_no_effect(place: StreamServer, update: dict[str, object]) -> None:
    trainer = place.trainer()
    await announce(trainer, step=5, version="v" * 256)
    number = await trainer.put(policy=spec_pb2.PolicyUpdate(**update))  # type: ignore[arg-type]
    await trainer.until(lambda t: bool(t.refused))
    (refused,) = trainer.refused
    assert (refused.start_sequence, refused.code) == (number, grpc.StatusCode.INVALID_ARGUMENT.value[0])
    assert refused.message.startswith("policy.")
    await play(trainer, "a")
    assert {ask.policy_step for ask in trainer.asks} == {5}


async def test_an_update_without_a_number_ends_the_connection(place: StreamServer) -> None:
    line = Line(place.channel)
    await line.welcome()
    await line.send(policy=spec_pb2.PolicyUpdate(paused=True))
    assert (await line.refused()).code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_set_policy_does_not_concern_streams(place: StreamServer) -> None:
    trainer = place.trainer()
    paused = rpb.SetPolicyRequest(policy=spec_pb2.PolicyUpdate(step=7, paused=True))
    try:
        assert not (await place.stub.SetPolicy(paused)).cancelled_uids
        await play(trainer, "a")
    finally:
        await place.stub.SetPolicy(rpb.SetPolicyRequest(policy=spec_pb2.PolicyUpdate()))
    assert not any(ask.HasField("policy_step") for ask in trainer.asks)


async def test_cancelling_works_during_a_pause_and_a_closed_stream_ends(place: StreamServer) -> None:
    trainer = place.trainer()
    await announce(trainer, paused=True)
    await trainer.put(start=start("a", count=2))
    await trainer.until(lambda t: len(t.started) == 2)
    selection = rpb.Selection(uids=[trainer.started[0].uid])
    await trainer.put(cancel=rpb.CancelRolloutsRequest(selection=selection, reason="enough"))
    await trainer.until(lambda t: len(t.outcomes) == 1)
    assert trainer.outcomes[0].outcome.cancellation.reason == "enough"
    trainer.automatic = False
    assert trainer.line is not None
    await trainer.line.call.done_writing()
    await trainer.until(lambda t: len(t.outcomes) == 2)
    assert "closed its stream" in trainer.outcomes[1].outcome.cancellation.reason
    assert not trainer.asks


@pytest.mark.parametrize(
    ("action", "masks"),
    [
        (spec_pb2.STALE_ACTION_KEEP, [[1, 1, 1, 1]]),
        (spec_pb2.STALE_ACTION_MASK, [[0, 0, 1, 1]]),
        (spec_pb2.STALE_ACTION_SPLIT, [[1, 1], [1, 1]]),
        (spec_pb2.STALE_ACTION_CANCEL, [[1, 1, 1, 1]]),
    ],
)
async def test_the_rest_of_an_aborted_completion_waits_for_the_end_of_the_pause(
    place: StreamServer, action: spec_pb2.StaleAction.ValueType, masks: list[list[int]]
) -> None:
    """The weights change in mid-completion: two tokens of step 1, two of step 2, and all tokens of step 1 are too old."""
    trainer, ids = place.trainer(), place.answer
    trainer.automatic = False
    place.held.gate.set()
    await announce(trainer, step=1)
    await trainer.put(start=start("a", agent="held", staleness=spec_pb2.Staleness(max_lag=0, action=action)))
    await trainer.until(lambda t: len(t.asks) == 1)
    await announce(trainer, paused=True)
    halves = token_pb2.Logprobs(values=[-0.5] * 2)
    part = cpb.CompleteResponse(finish_reason="abort", token_ids=ids[:2], logprobs=halves, policy_step=1)
    await trainer.put(answer=pb.TrainAnswer(turn_key=trainer.asks[0].turn_key, response=part))
    await play(place.trainer(), "another stream")
    await announce(trainer, paused=True)
    assert len(trainer.asks) == 1
    await announce(trainer, step=2)
    await trainer.until(lambda t: len(t.asks) == 2)
    rest = trainer.asks[1]
    assert (rest.turn_key, rest.policy_step) == (f"{trainer.asks[0].turn_key}/1", 2)
    assert [[*span.token_ids] for span in rest.resumed] == [ids[:2]]
    response = Book(ids).complete(rest)
    del response.token_ids[:2]
    response.logprobs.CopyFrom(halves)
    response.policy_step = 2
    await trainer.put(answer=pb.TrainAnswer(turn_key=rest.turn_key, response=response))
    trainer.automatic = True
    await trainer.until(lambda t: bool(t.outcomes))
    (outcome,) = [rollout.outcome for rollout in trainer.outcomes]
    stale = action == spec_pb2.STALE_ACTION_CANCEL
    assert outcome.cancellation.reason.startswith("stale: ") if stale else outcome.stop.reason == "stop"
    assert outcome.policy_step == 2
    assert [[*sample.response_mask] for sample in outcome.samples] == masks
    assert [sample.trainable for sample in outcome.samples] == ([False, True] if len(masks) == 2 else [not stale])
