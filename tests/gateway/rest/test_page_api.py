"""What a page of rollouts reads: texts of tokens, lists by failure class and text, and the server's counts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from tests.gateway.rest.test_real_server import finished, start
from tests.system.conftest import Service, open_world


@pytest.fixture
async def world() -> AsyncIterator[Service]:
    async with AsyncExitStack() as stack:
        yield await open_world(stack)


async def test_the_texts_of_tokens_are_read(world: Service) -> None:
    uid = await start(world, "r")
    await finished(world, uid)
    path = f"/v1/rollouts/{uid}/segments/0/tokens"
    whole = (await world.http.get(path)).json()["texts"]
    assert whole[0] == {"start": 0, "stop": 1, "text": "<|im_start|>", "special": True}
    assert (await world.http.get(path, params={"start": 2, "stop": 5})).json() == {"texts": whole[2:5]}
    for query in ({"start": -1}, {"start": 2**64}, {"stop": "x"}, {"further": 1}):
        assert (await world.http.get(path, params=query)).status_code == 422
    refused = await world.http.get(path, params={"start": 9, "stop": 8})
    assert (refused.status_code, refused.json()["error"]["fields"][0]["field"]) == (422, "stop")
    refused = await world.http.get(path, params={"start": 10**6})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "TOKENS_NOT_THERE")
    for wrong in (f"/v1/rollouts/{uid}/segments/7/tokens", "/v1/rollouts/nowhere/segments/0/tokens"):
        assert (await world.http.get(wrong)).status_code == 404


async def test_lists_select_by_failure_class_and_text(world: Service) -> None:
    await finished(world, await start(world, "good"))
    await finished(world, await start(world, "bad", "http://127.0.0.1:9"))

    async def ids(**query: str | list[str]) -> list[str]:
        reply = await world.http.get("/v1/rollouts", params=query)
        assert reply.status_code == 200, reply.text
        return [rollout["spec"]["rollout_id"] for rollout in reply.json()["rollouts"]]

    assert await ids(failure_class=["trainer", "cancelled"]) == ["bad"]
    assert await ids(text="GOOD") == ["good"]
    assert await ids(text="calculate 5 PLUS") == ["bad", "good"]
    assert (await world.http.get("/v1/rollouts", params={"failure_class": "x"})).status_code == 422
    assert (await world.http.get("/v1/rollouts", params={"text": "x" * 257})).status_code == 422


async def test_the_server_counts(world: Service) -> None:
    await finished(world, await start(world, "r"))
    server = (await world.http.get("/v1/server")).json()
    assert (server["finished"], server["failed"], server["running"], server["queued"]) == (1, 0, 0, 0)
    assert server["turns"] > 1
    assert server["generated_tokens"] > server["turns"]
    assert server["start_time"].endswith("Z")
    assert server["max_rollout_seconds"] > 0
    assert (await world.http.get("/v1/server?x=1")).status_code == 422
