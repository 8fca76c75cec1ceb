"""Groups over the REST API, with a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import quote

import pytest
from rollout_client import AsyncClient, InvalidRequest

from tests.gateway.rest.test_real_server import body
from tests.support.rest_gateway import Sse
from tests.system.conftest import Service, open_world


@pytest.fixture
async def world() -> AsyncIterator[Service]:
    """A server and a strict trainer."""
    async with AsyncExitStack() as stack:
        yield await open_world(stack)


def group_body(world: Service, **changes: Any) -> dict[str, Any]:
    return body("step-7", world.trainer.url, count=3, metadata={"ground_truth": "16"}, **changes)


async def events(world: Service, group_id: str, query: str = "", last: str | None = None) -> Sse:
    path = f"/v1/groups/{group_id}/events{query}"
    return await Sse.open("127.0.0.1", world.server.http_port, path, last)


async def test_a_group_from_its_start_to_its_result(world: Service) -> None:
    reply = await world.http.post("/v1/groups", json=group_body(world, group_id="step-7/prompt-3", refill=1))
    assert reply.status_code == 201, reply.text
    group = reply.json()["group"]
    assert (group["group_id"], group["refill"], group["result"]) == ("step-7/prompt-3", 1, None)
    assert [member["rollout_id"] for member in group["members"]] == ["step-7/0", "step-7/1", "step-7/2"]
    frames = await (await events(world, "step-7/prompt-3", "?view=samples")).all()
    assert [(frame.fields["id"], frame.fields["event"]) for frame in frames] == [
        *((str(number), "outcome") for number in (1, 2, 3)),
        ("4", "result"),
    ]
    for frame in frames[:3]:
        outcome = frame.json["rollout"]["outcome"]
        assert (outcome["end"], frame.json["usable"], frame.json["replaced"]) == ("stop", True, False)
        assert set(outcome["samples"][0]["response_mask"]) == {0, 1}
    result = {"asked": 3, "usable": 3, "refilled": 0, "completed": 3, "failed": 0, "cancelled": 0, "early_stop": False}
    assert frames[3].json == {"sequence": 4, "event": "result"} | result
    found = (await world.http.get("/v1/groups/step-7/prompt-3")).json()
    assert (found["result"], found["last_sequence"]) == (result, 4)
    resumed = await (await events(world, "step-7/prompt-3", last="2")).all()
    assert [frame.fields["id"] for frame in resumed] == ["3", "4"]
    assert "samples" not in resumed[0].json["rollout"]["outcome"]
    assert (await events(world, "step-7/prompt-3", "?after=4")).status == 204
    indices = [each["spec"]["group_index"] for each in (await world.http.get("/v1/rollouts")).json()["rollouts"]]
    assert indices == [2, 1, 0]


async def test_a_repeated_start_is_the_same_group(world: Service) -> None:
    replies = [
        await world.http.post("/v1/groups", json=group_body(world), headers={"Idempotency-Key": "key"})
        for _ in range(2)
    ]
    assert [reply.status_code for reply in replies] == [201, 200]
    assert replies[0].json()["group"]["group_id"] == replies[1].json()["group"]["group_id"]
    other = await world.http.post("/v1/groups", json=group_body(world, request_id="key", min_usable=2))
    assert (other.status_code, other.json()["error"]["code"]) == (409, "REQUEST_ID_TAKEN")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"count": 0}, "count"),
        ({"count": 1025}, "count"),
        ({"min_usable": 4}, "min_usable"),
        ({"group_index": 1}, "group_index"),
        ({"refil": 1}, "refil"),
    ],
)
async def test_wrong_fields_are_named(world: Service, changes: dict[str, Any], field: str) -> None:
    reply = await world.http.post("/v1/groups", json=group_body(world) | changes)
    assert reply.status_code == 422
    assert [fault["field"] for fault in reply.json()["error"]["fields"]] == [field]


async def test_an_unknown_group(world: Service) -> None:
    for path in ("/v1/groups/nothing", "/v1/groups/nothing/events"):
        reply = await world.http.get(path)
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "GROUP_NOT_FOUND")


@pytest.mark.parametrize("group_id", ["step-7/events", "/events", "step\n7", "step\r7", "step\x007", "step\x857"])
async def test_a_group_id_that_no_path_can_have_is_refused(world: Service, group_id: str) -> None:
    reply = await world.http.post("/v1/groups", json=group_body(world, group_id=group_id))
    assert reply.status_code == 422
    assert [fault["field"] for fault in reply.json()["error"]["fields"]] == ["group_id"]
    async with AsyncClient(f"127.0.0.1:{world.server.grpc_port}") as client:
        with pytest.raises(
            InvalidRequest, match=r'spec.group_id: must not contain line breaks .*, or end in "/events"'
        ):
            await client.start_group(
                2,
                group_id=group_id,
                rollout_id="g",
                messages=[{"role": "user", "content": "Hi."}],
                completions=world.trainer.url,
            )


@pytest.mark.parametrize("group_id", ["events", "a/events/b", "a b?c#d%2F", "é/漢\u2028"])
async def test_any_other_group_id_is_read_by_its_path(world: Service, group_id: str) -> None:
    assert (await world.http.post("/v1/groups", json=group_body(world, group_id=group_id))).status_code == 201
    path = f"/v1/groups/{quote(group_id)}"
    assert (await world.http.get(path)).json()["group_id"] == group_id
    frames = await (await events(world, quote(group_id))).all()
    assert [each.fields["event"] for each in frames] == [*["outcome"] * 3, "result"]
