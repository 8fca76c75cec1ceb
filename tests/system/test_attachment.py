"""A repeated request with the same id attaches to a running rollout, fetches an unreceived outcome, or starts a new rollout."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from osmosis.rollout.v1 import rollout_service_pb2 as pb

from tests.support.bodies import body, rpc
from tests.support.gated_model import GatedModel
from tests.system.conftest import Open, Service

Asking = asyncio.Task[httpx.Response]


class Gated:
    """A service whose trainer waits for the test, with the rollout `r1`."""

    def __init__(self, world: Service, gate: GatedModel) -> None:
        self.world = world
        self.gate = gate

    def ask(self, **changes: Any) -> Asking:
        """Request the rollout."""
        asked = body("r1", self.world.trainer.url, changes=changes)
        return asyncio.create_task(self.world.http.post("/rollout", json=asked))

    async def ask_and_hang_up(self) -> None:
        """Request the rollout and disconnect during the completion. Returns when the server has noticed."""
        asking = self.ask()
        await self.gate.asked()
        await self.hang_up(asking)
        await self.attached(0)

    async def hang_up(self, asking: Asking) -> None:
        """Close the connection."""
        asking.cancel()
        await asyncio.wait([asking])

    async def attached(self, count: int) -> None:
        """Wait until this many clients are attached. No rpc reports the number, so this reads the server's internals."""
        (rollout,) = self.world.server._registry._index.rollouts()
        while rollout._attached != count:  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    async def rollouts(self) -> list[pb.Rollout]:
        """All rollouts, the oldest first."""
        async with rpc(self.world.server.grpc_port) as stub:
            found = await stub.ListRollouts(pb.ListRolloutsRequest())
        return list(reversed(found.rollouts))

    async def finished(self) -> pb.Rollout:
        """Wait for the end of the only rollout, without attaching to it."""
        while True:
            (rollout,) = await self.rollouts()
            if rollout.state == pb.ROLLOUT_STATE_FINISHED:
                return rollout
            await asyncio.sleep(0.02)


@pytest.fixture
def grace() -> float:
    """The default grace time in seconds."""
    return 60.0


@pytest.fixture
async def gated(open_here: Open, grace: float) -> AsyncIterator[Gated]:
    gate = GatedModel()
    world = await open_here(model=gate, detach_grace_seconds=grace)
    yield Gated(world, gate)
    gate.open()


def uid(answer: httpx.Response) -> str:
    assert answer.status_code == 200
    return answer.headers["x-rollout-uid"]


async def test_the_same_payload_attaches_to_one_rollout(gated: Gated) -> None:
    asking = [gated.ask() for _ in range(5)]
    await gated.gate.asked()
    await gated.attached(5)
    gated.gate.open()
    answers = await asyncio.gather(*asking)
    assert len({uid(answer) for answer in answers}) == 1
    assert len({answer.content for answer in answers}) == 1
    assert answers[0].json()["status"] == "COMPLETED"
    assert len(gated.world.trainer.requests) == 3
    assert len(await gated.rollouts()) == 1


async def test_the_same_payload_written_in_another_way_is_the_same(gated: Gated) -> None:
    first = gated.ask()
    await gated.gate.asked()
    other = body("r1", gated.world.trainer.url + "/")
    other["messages"] = [{"content": "Please calculate 5 plus 3, and then multiply the result by 2.", "role": "user"}]
    second = asyncio.create_task(gated.world.http.post("/rollout", json=dict(reversed(other.items()))))
    await gated.attached(2)
    gated.gate.open()
    assert uid(await first) == uid(await second)


async def test_who_attaches_may_bring_a_new_key(gated: Gated) -> None:
    first = gated.ask(callback_api_key="sk-old")
    await gated.gate.asked()
    second = gated.ask(callback_api_key="sk-new")
    await gated.attached(2)
    gated.gate.open()
    assert uid(await first) == uid(await second)
    keys = [request.headers["authorization"] for request in gated.world.trainer.requests]
    assert keys == ["Bearer sk-old", "Bearer sk-new", "Bearer sk-new"]


async def test_who_comes_back_in_time_gets_the_result(gated: Gated) -> None:
    await gated.ask_and_hang_up()
    again = gated.ask()
    await gated.attached(1)
    gated.gate.open()
    answer = await again
    (rollout,) = await gated.rollouts()
    assert uid(answer) == rollout.uid
    assert answer.json()["status"] == "COMPLETED"
    assert len(gated.world.trainer.requests) == 3


async def test_an_outcome_that_nobody_received_is_handed_out_once(gated: Gated) -> None:
    await gated.ask_and_hang_up()
    gated.gate.open()
    unseen = await gated.finished()
    handed_out, anew = await gated.ask(), await gated.ask()
    assert uid(handed_out) == unseen.uid
    assert handed_out.json()["status"] == "COMPLETED"
    assert uid(anew) != unseen.uid
    assert len(gated.world.trainer.requests) == 6
    judged = gated.world.trainer.verdict("r1")
    assert judged is not None
    assert (judged.accepted, len(judged.earlier)) == (True, 1)


async def test_a_received_outcome_is_not_remembered(gated: Gated) -> None:
    gated.gate.open()
    uids = [uid(await gated.ask()) for _ in range(3)]
    assert len(set(uids)) == 3
    assert len(gated.world.trainer.requests) == 9


async def test_another_payload_after_the_end_is_a_new_rollout(gated: Gated) -> None:
    await gated.ask_and_hang_up()
    gated.gate.open()
    unseen = await gated.finished()
    assert uid(await gated.ask(max_turns=9)) != unseen.uid


@pytest.mark.parametrize("grace", [0.3])
async def test_who_does_not_come_back_in_time_finds_it_cancelled(gated: Gated) -> None:
    await gated.ask_and_hang_up()
    rollout = await gated.finished()
    assert rollout.outcome.cancellation.reason == "detached"
    answer = await gated.ask()
    assert uid(answer) == rollout.uid
    assert (answer.json()["status"], answer.json()["extra_fields"]["error_category"]) == ("ERROR", "cancelled")
    assert "detached" in answer.json()["error_message"]
    gated.gate.open()
    anew = await gated.ask()
    assert uid(anew) != rollout.uid
    # The trainer may refuse it: it has already counted the turn whose completion was not received.
    assert gated.world.trainer.requests[-1].headers["idempotency-key"].startswith(uid(anew))


@pytest.mark.parametrize("grace", [0])
async def test_no_grace_cancels_at_once(gated: Gated) -> None:
    await gated.ask_and_hang_up()
    assert (await gated.finished()).outcome.cancellation.reason == "detached"


@pytest.mark.parametrize("grace", [0])
async def test_with_somebody_left_nothing_is_cancelled(gated: Gated) -> None:
    stays, leaves = gated.ask(), gated.ask()
    await gated.gate.asked()
    await gated.attached(2)
    await gated.hang_up(leaves)
    await gated.attached(1)
    gated.gate.open()
    assert (await stays).json()["status"] == "COMPLETED"


async def test_a_rollout_that_waits_for_a_place_is_cancelled_too(open_here: Open) -> None:
    gate = GatedModel()
    world: Service = await open_here(model=gate, detach_grace_seconds=0.3, max_running=1)
    running = asyncio.create_task(world.http.post("/rollout", json=body("runs", world.trainer.url)))
    await gate.asked()
    waiting = asyncio.create_task(world.http.post("/rollout", json=body("waits", world.trainer.url)))
    async with rpc(world.server.grpc_port) as stub:
        while (await stub.GetServerInfo(pb.GetServerInfoRequest())).queued != 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        waiting.cancel()
        while (await stub.GetServerInfo(pb.GetServerInfoRequest())).finished != 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        waits = pb.ListRolloutsRequest(selection=pb.Selection(rollout_ids=["waits"]))
        (found,) = (await stub.ListRollouts(waits)).rollouts
    assert found.outcome.cancellation.reason == "detached"
    gate.open()
    assert (await running).json()["status"] == "COMPLETED"
