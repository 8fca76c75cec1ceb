"""The REST API in front of several real servers, with connections that break."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from rollout_gateway.app import create_app
from rollout_gateway.channel import open_channel

from tests.gateway.fleet.fleets import FleetMember, fleets
from tests.support.gateways import http_client, listening
from tests.support.rest_gateway import Sse
from tests.support.start_requests import HELLO, NOWHERE

TOKENIZER = {"name": "toy"}


@dataclass(frozen=True)
class Fronted:
    """Servers, and one gateway in front of them."""

    places: Sequence[FleetMember]
    http: httpx.AsyncClient
    host: str
    port: int

    async def start(self, rollout_id: str, agent: str, **metadata: int) -> str:
        """Start a rollout and return its uid."""
        asked: dict[str, Any] = {
            "rollout_id": rollout_id,
            "request_id": rollout_id,
            "agent": agent,
            "messages": [{"role": "user", "content": HELLO}],
            "completions": {"url": NOWHERE},
            "tokenizer": TOKENIZER,
            "metadata": metadata,
        }
        reply = await self.http.post("/v1/rollouts", json=asked)
        assert reply.is_success, reply.text
        return str(reply.json()["rollout"]["uid"])

    async def events(self, uid: str) -> Sse:
        """Open a stream of events."""
        return await Sse.open(self.host, self.port, f"/v1/rollouts/{uid}/events")


@pytest.fixture
async def fronted() -> AsyncIterator[Fronted]:
    """Three servers behind proxies."""
    async with AsyncExitStack() as stack:
        world = await stack.enter_async_context(fleets(3))
        channels = [await stack.enter_async_context(open_channel(place.proxy.address)) for place in world.places]
        host, port = await stack.enter_async_context(listening(create_app(channels)))
        client = http_client(f"http://{host}:{port}")
        yield Fronted(world.places, await stack.enter_async_context(client), host, port)


async def test_rollouts_of_all_servers_are_listed_followed_and_cancelled(fronted: Fronted) -> None:
    uids = [await fronted.start(f"r/{number}", "gated") for number in range(15)]
    assert len([place for place in fronted.places if await place.rollouts()]) > 1
    listed: list[str] = []
    token = ""
    while token or not listed:
        page = (await fronted.http.get("/v1/rollouts", params={"page_size": 4, "page_token": token})).json()
        listed += [rollout["uid"] for rollout in page["rollouts"]]
        token = page["next_page_token"]
    assert sorted(listed) == sorted(uids)
    cancelled = await fronted.http.post("/v1/rollouts/cancel", json={"all": True})
    assert sorted(cancelled.json()["uids"]) == sorted(uids)
    for uid in uids:
        last = (await (await fronted.events(uid)).all())[-1].json
        assert (last["event"], last["outcome"]["end"]) == ("finished", "cancellation")


async def test_a_stream_outlives_the_connection_to_its_server(fronted: Fronted) -> None:
    uid = await fronted.start("r", "gated", before=3, after=3)
    stream = await fronted.events(uid)
    frames = stream.frames()
    seen: list[dict[str, Any]] = []
    while len(seen) < 4:
        frame = await anext(frames)
        seen += [frame.json] if frame.is_event else []
    for place in fronted.places:
        await place.proxy.down()
        await place.proxy.mend()
        place.gated.gate.set()
    seen += [frame.json async for frame in frames if frame.is_event]
    assert stream.ended
    assert [each["sequence"] for each in seen] == list(range(1, len(seen) + 1))
    assert [each["event"] for each in seen] == ["accepted", *["note"] * 6, "finished"]
