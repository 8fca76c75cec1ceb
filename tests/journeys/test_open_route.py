"""The synchronous HTTP API without a key, while other APIs require one: the owner of its rollouts, and what stays protected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_client import NotFound, Unauthenticated
from rollout_server.runtime.start_request import Caller

from tests.journeys.faces import STARTS, Wanted, synchronous_body
from tests.journeys.place import Deployment, place, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

RUNNING = pb.ROLLOUT_STATE_RUNNING
ANONYMOUS = "anonymous"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Deployment]:
    """One server whose synchronous HTTP API is open. Detached rollouts are cancelled soon."""
    async with place(detach_grace_seconds=0.2, synchronous_needs_key=False) as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def closed() -> AsyncIterator[Deployment]:
    """One server that requires keys everywhere."""
    async with place() as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lent() -> AsyncIterator[Deployment]:
    """A gateway in front of two servers, which uses alice's key for requests of the synchronous HTTP API without a key."""
    async with place(2, default_key=True) as opened:
        yield opened


async def test_what_nobody_in_particular_started_belongs_to_nobody_in_particular(server: Deployment) -> None:
    begun = await STARTS["synchronous"](server, server.stranger, Wanted("open"))
    assert (await server.state(begun.uid)).caller == ANONYMOUS
    for person in (server.alice, server.bob):
        assert (await person.http.get(f"/v1/rollouts/{begun.uid}")).status_code == 404
        assert (await person.http.post(f"/v1/rollouts/{begun.uid}/cancel")).status_code == 404
        assert (await person.http.post("/v1/rollouts/cancel", json={"all": True})).json() == {"uids": []}
        with pytest.raises(NotFound):
            await person.grpc[0].get(begun.uid)
    found = (await server.root.http.get("/v1/rollouts", params={"caller": ANONYMOUS, "state": "running"})).json()
    assert [rollout["uid"] for rollout in found["rollouts"]] == [begun.uid]
    cancelled = await server.root.http.post(f"/v1/rollouts/{begun.uid}/cancel", json={"reason": "enough"})
    assert cancelled.json() == {"uids": [begun.uid]}
    assert begun.answer is not None
    assert "enough" in (await begun.answer).json()["error_message"]


async def test_who_brings_a_key_owns_the_rollout(server: Deployment) -> None:
    theirs = [await STARTS["synchronous"](server, person, Wanted("same")) for person in (server.stranger, server.alice)]
    assert theirs[0].uid != theirs[1].uid
    assert [(await server.state(begun.uid)).caller for begun in theirs] == [ANONYMOUS, "alice"]
    assert (await server.alice.http.post("/v1/rollouts/cancel", json={"all": True})).json() == {"uids": [theirs[1].uid]}
    assert (await server.state(theirs[0].uid)).state == RUNNING
    await server.root.http.post("/v1/rollouts/cancel", json={"all": True})
    for begun in theirs:
        assert begun.answer is not None
        assert (await begun.answer).json()["extra_fields"]["error_category"] == "cancelled"


async def test_two_without_a_key_who_ask_for_the_same_are_told_the_same(server: Deployment) -> None:
    first = await STARTS["synchronous"](server, server.stranger, Wanted("shared"))
    assert first.answer is not None
    second = asyncio.create_task(server.stranger.http.post("/rollout", json=synchronous_body(server, Wanted("shared"))))
    rollout = server.servers[0]._registry.get(first.uid, Caller("", admin=True))

    async def both() -> bool:
        return rollout._attached == 2

    await until(both)
    await server.root.http.post(f"/v1/rollouts/{first.uid}/cancel")
    answers = await asyncio.gather(first.answer, second)
    assert {answer.headers["x-rollout-uid"] for answer in answers} == {first.uid}


async def test_hanging_up_without_a_key_cancels_after_the_grace(server: Deployment) -> None:
    begun = await STARTS["synchronous"](server, server.stranger, Wanted("left"))
    assert begun.answer is not None
    begun.answer.cancel()
    await asyncio.wait([begun.answer])
    rollout = await server.finished_unwatched(begun.uid)
    assert (rollout.caller, rollout.outcome.cancellation.reason) == (ANONYMOUS, "detached")


async def test_the_open_route_opens_no_other(server: Deployment) -> None:
    body = {"rollout_id": "r", "server_url": "http://127.0.0.1:9", "messages": [], "completion_params": {}}
    asked = [
        server.stranger.http.post("/v1/rollout/init", json=body),
        server.stranger.http.post("/v1/rollouts", json={}),
        server.stranger.http.get("/v1/rollouts"),
        server.stranger.http.get("/v1/agents"),
        server.stranger.http.get("/metrics"),
        server.forger.http.post("/rollout", json=body),
        server.forger.http.get("/tools"),
        server.forger.http.get("/platform/health"),
    ]
    assert [answer.status_code for answer in await asyncio.gather(*asked)] == [401] * len(asked)
    for path in ("/tools", "/health", "/healthz", "/readyz", "/openapi.json"):
        assert (await server.stranger.http.get(path)).status_code == 200, path
    with pytest.raises(Unauthenticated):
        await server.stranger.grpc[0].agents()


async def test_a_wrong_body_is_told_only_to_those_who_may_send_one(server: Deployment, closed: Deployment) -> None:
    for here, status in ((server, 422), (closed, 401)):
        assert (await here.stranger.http.post("/rollout", json={})).status_code == status
        assert (await here.forger.http.post("/rollout", json={})).status_code == 401
        assert (await here.alice.http.post("/rollout", json={})).status_code == 422


async def test_where_a_key_is_needed_nothing_is_started_without(closed: Deployment) -> None:
    asked = synchronous_body(closed, Wanted("closed"))
    for person in (closed.stranger, closed.forger):
        assert (await person.http.post("/rollout", json=asked)).status_code == 401
        assert (await person.http.get("/tools")).status_code == 401
    assert (await closed.root.http.get("/v1/rollouts")).json()["rollouts"] == []
    assert closed.trainer.requests == ()
    begun = await STARTS["synchronous"](closed, closed.bob, Wanted("closed"))
    assert (await closed.state(begun.uid)).caller == "bob"
    await closed.bob.http.post("/v1/rollouts/cancel", json={"all": True})
    assert begun.answer is not None
    await begun.answer


async def test_a_gateways_own_key_owns_what_comes_without(lent: Deployment) -> None:
    begun = await STARTS["synchronous"](lent, lent.stranger, Wanted("lent"))
    assert (await lent.state(begun.uid)).caller == "alice"
    assert (await lent.stranger.http.get(f"/v1/rollouts/{begun.uid}")).status_code == 401
    assert (await lent.bob.http.get(f"/v1/rollouts/{begun.uid}")).status_code == 404
    assert (await lent.stranger.http.get("/tools")).status_code == 200
    assert (await lent.alice.http.post(f"/v1/rollouts/{begun.uid}/cancel")).json() == {"uids": [begun.uid]}
    assert begun.answer is not None
    assert (await begun.answer).json()["extra_fields"]["error_category"] == "cancelled"


async def test_everything_has_ended(server: Deployment) -> None:
    async def idle() -> bool:
        return (await server.root.grpc[0].server_info()).running == 0

    assert await until(idle)
