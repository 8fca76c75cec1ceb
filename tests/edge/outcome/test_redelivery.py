"""RedeliverOutcomes on a whole server: outcomes that were not delivered are sent again, unchanged."""

from __future__ import annotations

import grpc
import pytest
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_client import AsyncClient

from tests.edge.outcome.test_through_the_server import asked, check_same, settled, world
from tests.support.outcome_receiver import Answer
from tests.support.server_client import refusal, until

NO = Answer(grpc.StatusCode.INVALID_ARGUMENT, "this receiver is not ready")
DOWN = Answer(grpc.StatusCode.UNAVAILABLE, "busy")


@pytest.mark.parametrize("answer", [NO, DOWN])
async def test_a_receiver_that_works_again_gets_the_same_outcome(answer: Answer) -> None:
    async with world(answer, Answer(), delivery_retries=0) as (caller, trainer, receiver):
        uid = (await caller.start(asked(trainer, receiver.url))).rollout.uid
        failed = await settled(caller, uid)
        assert failed.delivery.state in (pb.DELIVERY_STATE_REFUSED, pb.DELIVERY_STATE_EXPIRED)
        async with AsyncClient(caller.address) as client:
            assert await client.redeliver(uid) == (uid,)
            rollout = await settled(caller, uid)
            assert (rollout.delivery.state, rollout.delivery.attempts) == (pb.DELIVERY_STATE_ACKNOWLEDGED, 2)
            check_same(receiver.came, rollout)
            assert len(receiver.came) == 2
            assert await client.redeliver(all=True) == ()


async def test_a_pending_delivery_does_not_wait_for_its_next_attempt() -> None:
    async with world(DOWN, Answer(), retry_base_seconds=1000, retry_max_seconds=1000) as (caller, trainer, receiver):
        uid = (await caller.start(asked(trainer, receiver.url))).rollout.uid

        async def waits() -> bool:
            return (await caller.get(uid)).delivery.HasField("next_attempt_time")

        await until(waits)
        async with AsyncClient(caller.address) as client:
            assert await client.redeliver(delivery_state="pending") == (uid,)
        rollout = await settled(caller, uid)
        assert rollout.delivery.state == pb.DELIVERY_STATE_ACKNOWLEDGED
        check_same(receiver.came, rollout)


async def test_nothing_selected_is_refused() -> None:
    async with world() as (caller, _, _receiver):
        refused = await refusal(caller.stub.RedeliverOutcomes(pb.RedeliverOutcomesRequest()))
        assert (refused.code, list(refused.fields)) == (grpc.StatusCode.INVALID_ARGUMENT, ["selection"])
        async with AsyncClient(caller.address) as client:
            with pytest.raises(ValueError, match="nothing is selected"):
                await client.redeliver()
