"""The examples of the OpenAPI description work as written, except for the trainer's address."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from rollout_server.testing import TrainerDialect
from rollout_server.testing.trainer import StrictTrainer

from tests.support.rest_gateway import Sse
from tests.system.conftest import Service, open_world

pytestmark = pytest.mark.asyncio(loop_scope="module")

DOCUMENTED_TRAINER = "http://localhost:9001"
STARTS = ("/rollout", "/v1/rollout/init", "/v1/rollouts")
GROUP = "/v1/groups"
CANCELS = ("/v1/rollouts/cancel", "/v1/rollouts/{uid}/cancel")


@dataclass(frozen=True)
class Documented:
    """A server with the examples' tokenizer, a trainer for both Osmosis HTTP APIs, and the description."""

    world: Service
    trainer: StrictTrainer
    described: dict[str, Any]

    def examples(self, method: str, path: str) -> dict[str, Any]:
        """The example bodies of an operation, by name."""
        content = self.described["paths"][path][method]["requestBody"]["content"]["application/json"]
        named = {name: example["value"] for name, example in content.get("examples", {}).items()}
        return named | ({"example": content["example"]} if "example" in content else {})

    async def send(self, method: str, path: str, example: Any) -> Any:
        """Send an example."""
        text = json.dumps(example).replace(DOCUMENTED_TRAINER, self.trainer.url)
        headers = {"content-type": "application/json"}
        return await self.world.http.request(method, path, content=text, headers=headers)

    async def finished(self, uid: str) -> dict[str, Any]:
        """Wait until a rollout has finished, and read it."""
        reply = await self.world.http.get(f"/v1/rollouts/{uid}", params={"wait": 60})
        return dict(reply.json())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def documented() -> AsyncIterator[Documented]:
    async with AsyncExitStack() as stack:
        world = await open_world(stack, tokenizers={"Qwen/Qwen3-8B": "toy"})
        url = f"http://127.0.0.1:{world.server.http_port}"
        trainer = await stack.enter_async_context(
            StrictTrainer(dialect=TrainerDialect.EITHER, tools_from=url, reuses_ids=True)
        )
        described = (await world.http.get("/openapi.json")).json()
        yield Documented(world, trainer, described)


async def test_every_operation_with_a_body_shows_one(documented: Documented) -> None:
    taking = {
        (method, path)
        for path, methods in documented.described["paths"].items()
        for method, operation in methods.items()
        if "requestBody" in operation and not path.startswith("/r/")  # those are OpenAI's and Anthropic's
    }
    assert taking == {("post", path) for path in (*STARTS, GROUP, *CANCELS)}
    for method, path in taking:
        assert documented.examples(method, path), path


@pytest.mark.parametrize("path", STARTS)
async def test_a_rollout_that_is_shown_comes_to_its_end(documented: Documented, path: str) -> None:
    for name, example in documented.examples("post", path).items():
        reply = await documented.send("post", path, example)
        assert reply.is_success, (name, reply.text)
        uid = reply.headers.get("x-rollout-uid") or reply.json()["rollout"]["uid"]
        rollout = await documented.finished(uid)
        assert (rollout["state"], rollout["outcome"]["end"]) == ("finished", "stop"), (name, rollout)
        judged = documented.trainer.verdict(rollout["spec"]["rollout_id"])
        assert judged is not None
        assert judged.refusals == ()
        if path == "/v1/rollout/init":
            told = await documented.trainer.completed(example["rollout_id"])
            assert (told["status"], told["finish_reason"]) == ("COMPLETED", "stop")


async def test_a_group_that_is_shown_comes_to_its_end(documented: Documented) -> None:
    for name, example in documented.examples("post", GROUP).items():
        reply = await documented.send("post", GROUP, example)
        assert reply.is_success, (name, reply.text)
        members = reply.json()["group"]["members"]
        assert len(members) == example["count"]
        for member in members:
            rollout = await documented.finished(member["uid"])
            assert (rollout["state"], rollout["outcome"]["end"]) == ("finished", "stop"), (name, rollout)
            judged = documented.trainer.verdict(rollout["spec"]["rollout_id"])
            assert judged is not None
            assert judged.refusals == ()


@pytest.mark.parametrize("path", CANCELS)
async def test_a_cancel_that_is_shown_is_taken(documented: Documented, path: str) -> None:
    started = await documented.send("post", STARTS[2], documented.examples("post", STARTS[2])["least"])
    for name, example in documented.examples("post", path).items():
        uid = started.json()["rollout"]["uid"]
        reply = await documented.send("post", path.replace("{uid}", uid), example)
        assert reply.status_code == 200, (name, reply.text)
        assert isinstance(reply.json()["uids"], list)


async def test_the_stream_that_is_shown_looks_like_a_real_one(documented: Documented) -> None:
    started = await documented.send("post", STARTS[2], documented.examples("post", STARTS[2])["least"])
    path = "/v1/rollouts/{uid}/events"
    shown = documented.described["paths"][path]["get"]["responses"]["200"]["content"]["text/event-stream"]
    where = path.replace("{uid}", started.json()["rollout"]["uid"])
    stream = await Sse.open("127.0.0.1", documented.world.server.http_port, where)
    real = [each async for each in stream.frames()]
    for number, block in enumerate(filter(None, shown["example"].split("\n\n"))):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        assert fields.keys() == real[number].fields.keys()
        if "data" in fields:
            assert json.loads(fields["data"]).keys() == real[number].json.keys()
    required = set(shown["itemSchema"]["properties"]["data"]["contentSchema"]["required"])
    assert all(required <= frame.json.keys() for frame in real if frame.is_event)
