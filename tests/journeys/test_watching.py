"""Watch through one API what was started through another, over connections that break: no event is lost or repeated."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.journeys.faces import STARTS, Begun, Wanted, synchronous_body
from tests.journeys.place import Deployment, Person, until
from tests.support.rest_gateway import Frame, Sse

pytestmark = pytest.mark.asyncio(loop_scope="module")

NOTES = 8


async def read(stream: Sse, last: int) -> list[dict[str, Any]]:
    """The events up to the one with this number."""
    seen: list[dict[str, Any]] = []
    async for frame in stream.frames():
        if frame.is_event:
            seen.append(frame.json)
            assert frame.fields["id"] == str(seen[-1]["sequence"])
        if seen and seen[-1]["sequence"] == last:
            break
    return seen


async def rest(here: Deployment, person: Person, uid: str, query: str, last: int) -> list[dict[str, Any]]:
    """The events after a number, until the end."""
    again = await here.sse(person, uid, query, str(last))
    return [] if again.status == 204 else [frame.json for frame in await again.all()]


async def answered(begun: Begun) -> None:
    """Assert that the synchronous HTTP API responds with the same end."""
    if begun.answer is not None:
        answer = await begun.answer
        assert (answer.status_code, answer.json()["status"]) == (200, "COMPLETED")


@pytest.mark.parametrize("face", STARTS)
async def test_it_is_watched_half_over_http_and_half_over_grpc(here: Deployment, face: str) -> None:
    rollout_id = f"watched {face}"
    begun = await STARTS[face](here, here.alice, Wanted(rollout_id, "calculator"))
    client = await here.over_grpc(here.root, begun.uid)
    whole = [event async for event in client.watch(begun.uid)]
    kinds = [str(event.WhichOneof("event")) for event in whole]
    assert [event.sequence for event in whole] == list(range(1, len(whole) + 1))
    assert (kinds[0], kinds[-1], kinds.count("answered")) == ("accepted", "finished", 3)
    for position in range(1, len(whole)):
        stream = await here.sse(here.alice, begun.uid)
        over_http = [(each["sequence"], each["event"]) for each in await read(stream, position)]
        stream.kill()
        mine = await here.over_grpc(here.alice, begun.uid)
        over_grpc = [
            (event.sequence, event.WhichOneof("event"))
            async for event in mine.watch(begun.uid, after_sequence=position)
        ]
        assert over_http + over_grpc == list(enumerate(kinds, 1))
    rollout = await client.get(begun.uid, view="messages")
    assert (rollout.outcome.stop.reason, rollout.caller) == ("stop", "alice")
    await answered(begun)
    if face == "asynchronous":
        assert (await here.trainer.completed(rollout_id))["status"] == "COMPLETED"
    judged = here.trainer.verdict(rollout_id)
    assert judged is not None
    assert (judged.refusals, len(judged.turns)) == ((), 3)


@pytest.mark.parametrize("face", STARTS)
async def test_a_connection_reset_at_each_event_of_a_running_rollout(here: Deployment, face: str) -> None:
    begun = await STARTS[face](here, here.alice, Wanted(f"measured {face}", "measured", {"notes": NOTES}))
    _, measured = here.agents[await here.server_of(begun.uid)]
    watching = asyncio.create_task(rest(here, here.root, begun.uid, "", 0))
    seen: list[dict[str, Any]] = []
    while not seen or seen[-1]["event"] != "finished":
        last = seen[-1]["sequence"] if seen else 0
        stream = await here.sse(here.alice, begun.uid, last=str(last))
        measured.permits.release()
        seen += await read(stream, last + 1)
        stream.kill()
        assert len(seen) == last + 1
    assert seen == await watching
    assert [each["sequence"] for each in seen] == list(range(1, len(seen) + 1))
    assert [each["event"] for each in seen].count("note") == NOTES
    measured.permits = type(measured.permits)(0)
    if begun.answer is not None:
        await begun.answer


async def test_who_hangs_up_and_comes_back_in_time_gets_the_result(here: Deployment) -> None:
    wanted = Wanted("come back")
    begun = await STARTS["synchronous"](here, here.alice, wanted)
    assert begun.answer is not None
    begun.answer.cancel()
    await asyncio.wait([begun.answer])
    body = synchronous_body(here, wanted)
    asking = [asyncio.create_task(person.http.post("/rollout", json=body)) for person in (here.alice, here.bob)]

    async def attached() -> bool:
        return await count(here, wanted.rollout_id) == 2

    await until(attached)
    for gated, _ in here.agents:
        gated.gate.set()
    hers, his = await asyncio.gather(*asking)
    assert (hers.headers["x-rollout-uid"], hers.json()["status"]) == (begun.uid, "COMPLETED")
    assert his.headers["x-rollout-uid"] != begun.uid
    assert await count(here, wanted.rollout_id) == 2
    for gated, _ in here.agents:
        gated.gate.clear()


async def count(here: Deployment, rollout_id: str) -> int:
    """The number of rollouts with this id."""
    found = await here.root.http.get("/v1/rollouts", params={"rollout_id": rollout_id})
    return len(found.json()["rollouts"])


async def test_a_connection_reset_within_an_event(here: Deployment) -> None:
    begun = await STARTS["plain"](here, here.alice, Wanted("within", "calculator"))
    whole = await rest(here, here.alice, begun.uid, "?detail=full", 0)
    assert whole[-1]["event"] == "finished"
    size = sum(len(str(each)) for each in whole)
    for cut in range(1, size, size // 40):
        stream = await here.sse(here.alice, begun.uid, "?detail=full")
        seen = await first_bytes(stream, cut)
        last = seen[-1]["sequence"] if seen else 0
        assert seen + await rest(here, here.alice, begun.uid, "?detail=full", last) == whole


async def first_bytes(stream: Sse, count: int) -> list[dict[str, Any]]:
    """The complete events within this many bytes of a stream, which is then reset."""
    text = b""
    while len(text) < count:
        size = int(await stream.reader.readline() or b"0", 16)
        if size == 0:
            break
        text += (await stream.reader.readexactly(size + 2))[:-2]
    stream.kill()
    blocks = text[:count].decode(errors="ignore").split("\n\n")[:-1]
    frames = [Frame(dict(line.partition(": ")[::2] for line in block.split("\n"))) for block in blocks]
    return [frame.json for frame in frames if frame.is_event]
