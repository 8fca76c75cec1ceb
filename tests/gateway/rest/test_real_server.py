"""The REST API with a real server and a strict trainer: whole rollouts, pages, streams, and the OpenAPI examples."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.support.bodies import QUESTION, TOKENIZER, rpc, start_request
from tests.support.gated_model import GatedModel
from tests.support.rest_gateway import Sse
from tests.system.conftest import Service, open_world

SECRET = "hush-this-is-a-secret"
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    """A stack that closes what the test opens."""
    async with AsyncExitStack() as opened:
        yield opened


def body(rollout_id: str, url: str, **changes: Any) -> dict[str, Any]:
    """A body for `POST /v1/rollouts`."""
    whole = {
        "rollout_id": rollout_id,
        "messages": [{"role": "user", "content": QUESTION, "n": 18446744073709551617}],
        "completions": {"url": url},
        "sampling": {"temperature": 0.7, "max_tokens": 512, "logprobs": True},
        "tokenizer": {"name": TOKENIZER},
    }
    return whole | changes


async def start(world: Service, rollout_id: str, url: str | None = None, **changes: Any) -> str:
    """Start a rollout and return its uid."""
    reply = await world.http.post("/v1/rollouts", json=body(rollout_id, url or world.trainer.url, **changes))
    assert reply.status_code == 201, reply.text
    return str(reply.json()["rollout"]["uid"])


async def finished(world: Service, uid: str, view: str = "full") -> dict[str, Any]:
    """Wait for a rollout's end."""
    while True:
        reply = await world.http.get(f"/v1/rollouts/{uid}", params={"wait": 30, "view": view})
        assert reply.status_code == 200
        rollout: dict[str, Any] = reply.json()
        if rollout["state"] == "finished":
            return rollout


async def events(world: Service, uid: str, query: str = "", last: str | None = None) -> Sse:
    """Open a stream of events."""
    return await Sse.open("127.0.0.1", world.server.http_port, f"/v1/rollouts/{uid}/events{query}", last)


async def test_a_rollout_from_its_start_to_its_end(stack: AsyncExitStack) -> None:
    world = await open_world(stack)
    uid = await start(world, "step-1/a", metadata={"ground_truth": "16"}, labels={"k": "v"})
    rollout = await finished(world, uid)
    outcome = rollout["outcome"]
    assert (rollout["uid"], rollout["spec"]["rollout_id"], outcome["end"]) == (uid, "step-1/a", "stop")
    assert outcome["messages"][0] == {"role": "user", "content": QUESTION, "n": 18446744073709551617}
    assert rollout["spec"]["labels"] == {"k": "v"}
    assert rollout["spec"]["completions"] == {"url": world.trainer.url, "dialect": "http_masked"}
    (sample,) = outcome["samples"]
    assert len(sample["response_ids"]) == len(sample["response_mask"]) == len(sample["logprobs"])
    assert set(sample["response_mask"]) == {0, 1}
    spans = outcome["segments"][0]["spans"]
    assert [token for span in spans for token in span["token_ids"]] == sample["prompt_ids"] + sample["response_ids"]
    verdict = world.trainer.verdict("step-1/a")
    assert verdict is not None
    assert verdict.accepted


async def test_a_request_id_makes_retries_safe(stack: AsyncExitStack) -> None:
    world = await open_world(stack)
    asked = body("r", world.trainer.url, request_id="q")
    first = await world.http.post("/v1/rollouts", json=asked)
    again = await world.http.post("/v1/rollouts", json=asked)
    other = await world.http.post("/v1/rollouts", json={**asked, "priority": 1})
    assert (first.status_code, again.status_code, other.status_code) == (201, 200, 409)
    assert first.json()["rollout"]["uid"] == again.json()["rollout"]["uid"]
    assert other.json()["error"]["code"] == "REQUEST_ID_TAKEN"
    assert [tool["function"]["name"] for tool in first.json()["tools"]] == ["add", "subtract", "multiply", "divide"]


async def test_pages_do_not_shift_while_rollouts_start(stack: AsyncExitStack) -> None:
    world = await open_world(stack)
    before = [await start(world, f"old-{number}", NOWHERE, group_id="g") for number in range(7)]
    seen: list[str] = []
    token = ""
    while True:
        reply = await world.http.get(
            "/v1/rollouts", params={"page_size": 3, "page_token": token, "group_id": "g", "view": "messages"}
        )
        page = reply.json()
        seen += [rollout["uid"] for rollout in page["rollouts"]]
        token = page["next_page_token"]
        if not token:
            break
        await start(world, f"new-{len(seen)}", NOWHERE, group_id="g")
    assert seen == before[::-1]
    wrong = await world.http.get("/v1/rollouts", params={"page_token": "x"})
    assert (wrong.status_code, wrong.json()["error"]["fields"][0]["field"]) == (422, "page_token")


async def test_rollouts_are_found_by_what_they_are(stack: AsyncExitStack) -> None:
    world = await open_world(stack)
    uids = [await start(world, f"r/{number}", NOWHERE, labels={"n": str(number), "all": "x"}) for number in range(3)]
    for uid in uids:
        await finished(world, uid, "basic")

    async def found(query: str) -> set[str]:
        reply = await world.http.get(f"/v1/rollouts?{query}")
        assert reply.status_code == 200, reply.text
        return {rollout["uid"] for rollout in reply.json()["rollouts"]}

    assert await found("label=all%3Dx") == set(uids)
    assert await found("label=n%3D1&label=all%3Dx") == {uids[1]}
    assert await found("label=n%3D1&label=all%3Dy") == set()
    assert await found("rollout_id=r%2F0&rollout_id=r%2F2") == {uids[0], uids[2]}
    assert await found(f"uid={uids[0]}&rollout_id=r%2F2") == set()
    assert await found("state=finished&agent=calculator") == set(uids)
    assert await found("state=running") == set()


async def test_a_stream_killed_at_every_event_loses_nothing_and_repeats_nothing(stack: AsyncExitStack) -> None:
    world = await open_world(stack)
    uid = await start(world, "r")
    whole = [frame.json for frame in await (await events(world, uid, "?detail=full")).all()]
    assert [each["sequence"] for each in whole] == list(range(1, len(whole) + 1))
    assert (whole[0]["event"], whole[-1]["event"]) == ("accepted", "finished")
    assert {"asked", "answered", "tool_started", "tool_returned"} <= {each["event"] for each in whole}
    for position in range(1, len(whole) + 1):
        stream = await events(world, uid, "?detail=full")
        seen = []
        async for frame in stream.frames():
            if frame.is_event:
                seen.append(frame.json)
            if len(seen) == position:
                break
        stream.kill()
        again = await events(world, uid, "?detail=full", last=str(position))
        rest = [] if again.status == 204 else [frame.json for frame in await again.all()]
        assert seen + rest == whole
    beyond = await events(world, uid, last=str(len(whole) + 1))
    assert (beyond.status, (await beyond.body())["error"]["code"]) == (400, "EVENTS_GONE")


async def test_a_running_rollout_is_followed_and_cancelled(stack: AsyncExitStack) -> None:
    model = GatedModel()
    stack.callback(model.open)
    world = await open_world(stack, model=model)
    uid = await start(world, "r")
    stream = await events(world, uid)
    frames = stream.frames()
    kinds: list[str] = []
    while "asked" not in kinds:
        kinds.append((await anext(frames)).fields.get("event", ""))
    await model.asked()
    reply = await world.http.post(f"/v1/rollouts/{uid}/cancel", json={"reason": "enough"})
    assert reply.json() == {"uids": [uid]}
    last = [frame async for frame in frames][-1].json
    assert (last["event"], last["outcome"]["end"], last["outcome"]["reason"]) == ("finished", "cancellation", "enough")
    assert (await world.http.post("/v1/rollouts/cancel", json={"uids": [uid]})).json() == {"uids": []}
    assert (await world.http.post("/v1/rollouts/cancel", json={})).status_code == 422
    assert (await world.http.post("/v1/rollouts/no-such-rollout/cancel")).status_code == 404
    model.open()


async def test_a_rollout_of_grpc_is_the_same_here(stack: AsyncExitStack) -> None:
    world = await open_world(stack)
    async with rpc(world.server.grpc_port) as stub:
        started = await stub.StartRollout(start_request("over-grpc", world.trainer.url))
        uid = started.rollout.uid
        assert (await finished(world, uid, "basic"))["spec"]["rollout_id"] == "over-grpc"
        assert (await (await events(world, uid, "?detail=outcome")).all())[0].json["outcome"]["end"] == "stop"
    assert (await world.http.post(f"/v1/rollouts/{uid}/acknowledge")).status_code == 204
    assert (await world.http.post("/v1/rollouts/no-such-rollout/acknowledge")).status_code == 404


async def test_a_secret_is_nowhere_to_be_read(stack: AsyncExitStack) -> None:
    world = await open_world(stack)
    endpoint = {"url": NOWHERE, "bearer": SECRET}
    reply = await world.http.post("/v1/rollouts", json=body("r", NOWHERE, completions=endpoint))
    uid = reply.json()["rollout"]["uid"]
    told = [reply.text, json.dumps(await finished(world, uid))]
    told += [json.dumps(frame.json) for frame in await (await events(world, uid, "?detail=full")).all()]
    for path in ("/v1/rollouts?view=full", "/v1/agents", "/metrics", "/readyz", "/openapi.json"):
        told.append((await world.http.get(path)).text)
    wrong = {"url": f"http://user:{SECRET}@127.0.0.1:9", "bearer": SECRET}
    refused = await world.http.post("/v1/rollouts", json=body("r", NOWHERE, completions=wrong))
    assert (refused.status_code, refused.json()["error"]["fields"][0]["field"]) == (422, "completions.url")
    assert not any(SECRET in each for each in [*told, refused.text])


async def test_faults_that_only_the_server_sees_are_named_as_in_the_body(stack: AsyncExitStack) -> None:
    world = await open_world(stack)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"messages": [{"content": "no role"}]}, "messages[0]"),
        ({"messages": [5]}, "messages[0]"),
        ({"completions": {"url": "ftp://x"}}, "completions.url"),
        ({"tokenizer": None}, "tokenizer"),
        ({"limits": {"turns": 0}}, "limits.turns"),
        ({"rollout_id": " "}, "rollout_id"),
        ({"labels": {"k": "v" * 257}}, "labels"),
    ]
    for changes, field in wrong:
        reply = await world.http.post("/v1/rollouts", json=body("r", NOWHERE) | changes)
        fields = [each["field"] for each in reply.json()["error"]["fields"]]
        assert reply.status_code == 422
        assert all(each.startswith(field) for each in fields), fields
        assert fields
    missing = await world.http.post("/v1/rollouts", json=body("r", NOWHERE, agent="nobody"))
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "AGENT_NOT_FOUND")
