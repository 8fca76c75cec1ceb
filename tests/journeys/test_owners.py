"""A rollout started through one API is visible and can be cancelled through the others, by its owner and the admin only."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_client import NotFound, PermissionDenied, RolloutError, Unauthenticated

from tests.journeys.faces import CANCELS, STARTS, Begun, Wanted
from tests.journeys.place import ADMIN, Deployment, Person

pytestmark = pytest.mark.asyncio(loop_scope="module")

RUNNING, FINISHED = pb.ROLLOUT_STATE_RUNNING, pb.ROLLOUT_STATE_FINISHED
NOBODY = "00000000000000000000"


async def begin(here: Deployment, face: str, person: Person, rollout_id: str) -> Begun:
    """Start a rollout that waits until it is cancelled."""
    begun = await STARTS[face](here, person, Wanted(rollout_id))
    assert (await here.state(begun.uid)).state == RUNNING
    return begun


async def end(here: Deployment, begun: Begun) -> None:
    """Cancel it, and wait until everything about it has ended."""
    client = await here.over_grpc(here.root, begun.uid)
    await client.cancel(begun.uid)
    await here.finished(begun.uid)
    if begun.answer is not None:
        await begun.answer


async def listed(here: Deployment, person: Person, **query: Any) -> list[Any]:
    """The rollouts that the caller can list over HTTP."""
    reply = await person.http.get("/v1/rollouts", params={"page_size": 1000, **query})
    assert reply.status_code == 200, reply.text
    return list(reply.json()["rollouts"])


async def listed_over_grpc(person: Person, **selection: Any) -> list[str]:
    """The rollouts that the caller can list over gRPC, on all servers."""
    return [rollout.uid for client in person.grpc for rollout in [each async for each in client.list(**selection)]]


@pytest.mark.parametrize("face", STARTS)
async def test_owner_and_admin_see_it_everywhere(here: Deployment, face: str) -> None:
    begun = await begin(here, face, here.alice, f"seen {face}")
    uid = begun.uid
    for person in (here.alice, here.root):
        got = await person.http.get(f"/v1/rollouts/{uid}")
        assert (got.status_code, got.json()["state"], got.json()["caller"]) == (200, "running", "alice")
        (found,) = await listed(here, person, rollout_id=f"seen {face}")
        assert (found["uid"], found["caller"]) == (uid, "alice")
        client = await here.over_grpc(person, uid)
        assert (await client.get(uid)).caller == "alice"
        assert await listed_over_grpc(person, rollout_id=f"seen {face}") == [uid]
        assert uid in await listed_over_grpc(person, caller="alice", state="running")
    await end(here, begun)


@pytest.mark.parametrize("face", STARTS)
async def test_for_others_it_does_not_exist(here: Deployment, face: str) -> None:
    begun = await begin(here, face, here.alice, f"hidden {face}")
    uid, bob = begun.uid, here.bob
    for method, path in ROUTES:
        theirs = await bob.http.request(method, path.format(uid=uid))
        nobodys = await bob.http.request(method, path.format(uid=NOBODY))
        assert (theirs.status_code, nobodys.status_code) == (404, 404), path
        assert theirs.json()["error"]["code"] == "ROLLOUT_NOT_FOUND"
        assert theirs.json()["error"]["message"] == nobodys.json()["error"]["message"].replace(NOBODY, uid)
    for query in ({}, {"uid": uid}, {"rollout_id": f"hidden {face}"}, {"caller": "bob"}, {"state": "running"}):
        assert uid not in [rollout["uid"] for rollout in await listed(here, bob, **query)], query
    for selection in ({}, {"uid": uid}, {"caller": "bob"}, {"rollout_id": f"hidden {face}"}):
        assert uid not in await listed_over_grpc(bob, **selection), selection
    client = await here.over_grpc(bob, uid)
    for asked in (client.get(uid), client.wait(uid, timeout=5), client.acknowledge(uid), anext(client.watch(uid))):
        with pytest.raises(NotFound):
            await asked
    assert (await here.state(uid)).state == RUNNING
    await end(here, begun)


ROUTES = (
    ("GET", "/v1/rollouts/{uid}"),
    ("GET", "/v1/rollouts/{uid}?wait=5&view=full"),
    ("GET", "/v1/rollouts/{uid}/events"),
    ("GET", "/v1/rollouts/{uid}/events?after=1&detail=full"),
    ("POST", "/v1/rollouts/{uid}/cancel"),
    ("POST", "/v1/rollouts/{uid}/acknowledge"),
)


@pytest.mark.parametrize("face", STARTS)
async def test_who_has_no_key_is_told_of_nothing_else(here: Deployment, face: str) -> None:
    begun = await begin(here, face, here.alice, f"keyed {face}")
    for person in (here.stranger, here.forger):
        for method, path in (*ROUTES, ("GET", "/v1/rollouts"), ("GET", "/v1/rollouts?page_size=many")):
            for uid in (begun.uid, NOBODY):
                answer = await person.http.request(method, path.format(uid=uid))
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "KEY_NEEDED")
        client = await here.over_grpc(person, begun.uid)
        uid = begun.uid
        for asked in (client.get(uid), client.cancel(uid), anext(client.watch(uid)), anext(aiter(client.list()))):
            with pytest.raises(Unauthenticated):
                await asked
    assert (await here.state(begun.uid)).state == RUNNING
    await end(here, begun)


@pytest.mark.parametrize("by", ["alice", "root"])
@pytest.mark.parametrize("way", CANCELS)
@pytest.mark.parametrize("face", STARTS)
async def test_owner_and_admin_cancel_it_on_any_other_face(here: Deployment, face: str, way: str, by: str) -> None:
    rollout_id = f"cancelled {face} {way} {by}"
    begun = await begin(here, face, here.alice, rollout_id)
    person: Person = getattr(here, by)
    assert await CANCELS[way](here, person, begun.uid)
    rollout = await here.finished(begun.uid)
    assert rollout.outcome.cancellation.reason == person.name
    if begun.answer is not None:
        answer = await begun.answer
        assert (answer.status_code, answer.json()["extra_fields"]["error_category"]) == (200, "cancelled")
        assert person.name in answer.json()["error_message"]
    if face == "asynchronous":
        told = await here.trainer.completed(rollout_id)
        assert (told["status"], told["extra_fields"]["error_category"]) == ("ERROR", "cancelled")
    assert not await CANCELS[way](here, person, begun.uid)


@pytest.mark.parametrize("way", CANCELS)
@pytest.mark.parametrize("face", STARTS)
async def test_what_others_cancel_goes_on(here: Deployment, face: str, way: str) -> None:
    begun = await begin(here, face, here.alice, f"kept {face} {way}")
    assert not await CANCELS[way](here, here.bob, begun.uid)
    assert (await here.state(begun.uid)).state == RUNNING
    await end(here, begun)


async def test_all_means_all_of_ones_own(here: Deployment) -> None:
    hers = [await begin(here, face, here.alice, f"hers {face}") for face in STARTS]
    his = [await begin(here, face, here.bob, f"his {face}") for face in STARTS]
    reply = await here.bob.http.post("/v1/rollouts/cancel", json={"all": True})
    assert set(reply.json()["uids"]) == {begun.uid for begun in his}
    assert {(await here.state(begun.uid)).state for begun in hers} == {RUNNING}
    cancelled = [uid for client in here.alice.grpc for uid in await client.cancel(all=True)]
    assert set(cancelled) == {begun.uid for begun in hers}
    for begun in (*hers, *his):
        await here.finished(begun.uid)
        if begun.answer is not None:
            await begun.answer


async def test_to_ask_for_anothers_rollouts_is_refused(here: Deployment) -> None:
    begun = await begin(here, "plain", here.alice, "asked for")
    asked = [
        here.bob.http.get("/v1/rollouts", params={"caller": "alice"}),
        here.bob.http.get("/v1/rollouts", params={"caller": ["bob", "nobody"]}),
        here.bob.http.post("/v1/rollouts/cancel", json={"callers": ["alice"]}),
    ]
    for answer in await asyncio.gather(*asked):
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "ADMIN_KEY_NEEDED")
    client = await here.over_grpc(here.bob, begun.uid)
    for call in (client.cancel(caller="alice"), anext(aiter(client.list(caller="alice")))):
        with pytest.raises(PermissionDenied):
            await call
    assert (await here.state(begun.uid)).state == RUNNING
    await end(here, begun)


async def test_one_uid_of_somebody_else_spoils_the_whole_call(here: Deployment) -> None:
    hers, his = await begin(here, "plain", here.alice, "hers"), await begin(here, "grpc", here.bob, "his")
    reply = await here.bob.http.post("/v1/rollouts/cancel", json={"uids": [his.uid, hers.uid]})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "ROLLOUT_NOT_FOUND")
    assert his.uid not in reply.text
    client = await here.over_grpc(here.bob, his.uid)
    with pytest.raises(NotFound):
        await client.cancel(uids=[his.uid, hers.uid])
    assert [(await here.state(begun.uid)).state for begun in (hers, his)] == [RUNNING, RUNNING]
    await end(here, hers)
    await end(here, his)


@pytest.mark.parametrize("face", STARTS)
async def test_the_same_request_of_another_caller_is_another_rollout(here: Deployment, face: str) -> None:
    first = await begin(here, face, here.alice, f"same {face}")
    second = await begin(here, face, here.bob, f"same {face}")
    assert first.uid != second.uid
    assert [(await here.state(begun.uid)).caller for begun in (first, second)] == ["alice", "bob"]
    both = {rollout["uid"] for rollout in await listed(here, here.root, rollout_id=f"same {face}")}
    assert both == {first.uid, second.uid}
    assert [each["uid"] for each in await listed(here, here.bob, rollout_id=f"same {face}")] == [second.uid]
    await asyncio.gather(end(here, first), end(here, second))


async def test_the_admin_owns_what_it_starts(here: Deployment) -> None:
    begun = await begin(here, "grpc", here.root, "the admin's")
    assert (await here.state(begun.uid)).caller == ADMIN
    for person in (here.alice, here.bob):
        with pytest.raises(RolloutError):
            await (await here.over_grpc(person, begun.uid)).get(begun.uid)
    await end(here, begun)
