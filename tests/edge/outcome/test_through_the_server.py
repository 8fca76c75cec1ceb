"""Outcomes of a whole server, sent to a gRPC receiver named by the request: exactly one, repeated only until it is settled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1 import spec_pb2
from rollout_server.calculator import Calculator
from rollout_server.testing.script import Fault, Script
from rollout_server.testing.trainer import StrictTrainer

from tests.support.agents import Idle
from tests.support.calculator_tools import calculator_tools
from tests.support.outcome_receiver import Answer, Delivered, GrpcReceiver, grpc_receiver
from tests.support.server_client import Caller, refusal, serving, until
from tests.support.start_requests import metadata, start, target

PENDING = (pb.DELIVERY_STATE_UNSPECIFIED, pb.DELIVERY_STATE_PENDING)


@asynccontextmanager
async def world(*answers: Answer, **settings: Any) -> AsyncIterator[tuple[Caller, StrictTrainer, GrpcReceiver]]:
    """A server, a strict trainer of the asynchronous HTTP API, and a receiver. Pauses between attempts are short."""
    async with (
        serving(Calculator(), Idle(), **{"retry_base_seconds": 0.02, **settings}) as caller,
        StrictTrainer(dialect="plain", tools=calculator_tools()) as trainer,
        grpc_receiver(*answers) as receiver,
    ):
        yield caller, trainer, receiver


def asked(trainer: StrictTrainer, receiver: str, **changes: Any) -> pb.StartRolloutRequest:
    """A rollout whose trainer counts no masks, and whose outcome goes to another receiver."""
    fields: dict[str, Any] = {
        "agent": "calculator",
        "completions": target(trainer.url, dialect=spec_pb2.DIALECT_HTTP_PLAIN),
        "outcome": target(receiver),
        "tokenizer": None,
        "metadata_json": metadata(ground_truth=16),
    }
    request = start(**(fields | changes))
    request.credentials.outcome_bearer = "sk-receiver"
    return request


async def settled(caller: Caller, uid: str) -> pb.Rollout:
    """Wait until the delivery is settled."""

    async def is_over() -> bool:
        return (await caller.get(uid)).delivery.state not in PENDING

    await until(is_over)
    return await caller.get(uid, pb.ROLLOUT_VIEW_SAMPLES)


def check_same(came: list[Delivered], rollout: pb.Rollout) -> pb.Rollout:
    """Assert that all deliveries are equal: bytes, key and credential. Returns the delivered rollout."""
    assert len({each.raw for each in came}) == 1
    assert {each.metadata["authorization"] for each in came} == {"Bearer sk-receiver"}
    request = came[0].request
    assert request.delivery_key
    told = request.rollout
    assert (told.uid, told.state) == (rollout.uid, pb.ROLLOUT_STATE_FINISHED)
    assert not told.HasField("delivery")
    assert told.outcome == rollout.outcome
    return told


async def test_a_receiver_hears_exactly_one_outcome() -> None:
    async with world() as (caller, trainer, receiver):
        uid = (await caller.start(asked(trainer, receiver.url))).rollout.uid
        rollout = await settled(caller, uid)
        told = check_same(receiver.came, rollout)
        assert len(receiver.came) == 1
        assert (rollout.delivery.state, rollout.delivery.attempts) == (pb.DELIVERY_STATE_ACKNOWLEDGED, 1)
        assert (told.outcome.stop.reason, told.outcome.HasField("reward")) == ("stop", True)
        assert told.outcome.samples[0].response_ids
        assert "16" in told.outcome.messages[-1].json


LOST = {
    "silence": [Answer(silent=True)],
    "internal": [Answer(grpc.StatusCode.INTERNAL, "taken, but the answer broke")],
    "unavailable twice": [Answer(grpc.StatusCode.UNAVAILABLE), Answer(grpc.StatusCode.UNAVAILABLE)],
    "all kinds": [Answer(grpc.StatusCode.UNKNOWN), Answer(grpc.StatusCode.ABORTED), Answer(silent=True)],
}


@pytest.mark.parametrize("lost", LOST.values(), ids=LOST.keys())
async def test_a_lost_acknowledgement_leads_to_a_repetition_under_the_same_key(lost: list[Answer]) -> None:
    async with world(*lost, Answer(), delivery_timeout_seconds=0.3) as (caller, trainer, receiver):
        uid = (await caller.start(asked(trainer, receiver.url))).rollout.uid
        rollout = await settled(caller, uid)
        check_same(receiver.came, rollout)
        assert len(receiver.came) == len(lost) + 1
        assert rollout.delivery.attempts == len(lost) + 1
        assert rollout.delivery.state == pb.DELIVERY_STATE_ACKNOWLEDGED


async def test_a_refusal_is_final_and_listed() -> None:
    async with world(Answer(grpc.StatusCode.INVALID_ARGUMENT, "no such rollout")) as (caller, trainer, receiver):
        uid = (await caller.start(asked(trainer, receiver.url))).rollout.uid
        rollout = await settled(caller, uid)
        assert rollout.delivery.state == pb.DELIVERY_STATE_REFUSED
        assert "no such rollout" in rollout.delivery.error
        assert len(receiver.came) == 1
        selection = pb.Selection(delivery_states=[pb.DELIVERY_STATE_REFUSED])
        listed = await caller.stub.ListRollouts(pb.ListRolloutsRequest(selection=selection))
        assert [each.uid for each in listed.rollouts] == [uid]


async def test_what_nobody_takes_expires_and_is_listed() -> None:
    busy = Answer(grpc.StatusCode.UNAVAILABLE, "busy")
    async with world(busy, delivery_retries=2) as (caller, trainer, receiver):
        uid = (await caller.start(asked(trainer, receiver.url))).rollout.uid
        rollout = await settled(caller, uid)
        check_same(receiver.came, rollout)
        assert (rollout.delivery.state, rollout.delivery.attempts) == (pb.DELIVERY_STATE_EXPIRED, 3)
        assert "busy" in rollout.delivery.error


async def test_nothing_is_sent_after_an_acknowledgement_on_another_way() -> None:
    busy = Answer(grpc.StatusCode.UNAVAILABLE, "busy")
    async with world(busy, retry_base_seconds=0.2) as (caller, trainer, receiver):
        uid = (await caller.start(asked(trainer, receiver.url))).rollout.uid
        await receiver.has(1)
        await caller.stub.AcknowledgeOutcome(pb.AcknowledgeOutcomeRequest(uid=uid))
        rollout = await settled(caller, uid)
        assert rollout.delivery.state == pb.DELIVERY_STATE_ACKNOWLEDGED
        came = len(receiver.came)
        await asyncio.sleep(0.5)
        assert len(receiver.came) == came


async def test_failures_and_cancellations_are_outcomes_too() -> None:
    async with world(retries=0) as (caller, trainer, receiver):
        await trainer.put_script("failing", Script((Fault.error(500, "out of order"),)))
        failing = (await caller.start(asked(trainer, receiver.url, rollout_id="failing"))).rollout.uid
        waiting = (await caller.start(asked(trainer, receiver.url, agent="idle"))).rollout.uid
        for uid in (failing, waiting):
            await settled(caller, uid)
        told = {each.request.rollout.uid: each.request.rollout.outcome for each in receiver.came}
        assert told.keys() == {failing, waiting}
        assert told[failing].failure.http_status == 500
        assert len({each.request.delivery_key for each in receiver.came}) == 2


async def test_the_synchronous_dialect_has_no_callback_for_outcomes() -> None:
    async with world() as (caller, trainer, _):
        wrong = target("http://127.0.0.1:9", dialect=spec_pb2.DIALECT_HTTP_MASKED)
        refused = await refusal(caller.start(asked(trainer, "", outcome=wrong)))
        assert (refused.code, list(refused.fields)) == (grpc.StatusCode.INVALID_ARGUMENT, ["spec.outcome.dialect"])


async def test_a_receiver_beside_a_trainer_that_counts_masks() -> None:
    """The outcome target has its own protocol: gRPC here, while completions use the synchronous HTTP API."""
    async with world() as (caller, _, receiver), StrictTrainer(tools=calculator_tools()) as masked:
        fields: dict[str, Any] = {
            "completions": target(masked.url),
            "tokenizer": spec_pb2.Tokenizer(name="toy"),
        }
        uid = (await caller.start(asked(masked, receiver.url, **fields))).rollout.uid
        rollout = await settled(caller, uid)
        check_same(receiver.came, rollout)
        assert rollout.outcome.stop.reason == "stop"
