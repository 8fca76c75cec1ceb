"""Hundreds of rollouts at once: no token, number or tool result of one appears in another."""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1 import rollout_service_pb2_grpc
from osmosis.rollout.v1.rollout_service_pb2 import ROLLOUT_VIEW_SAMPLES
from osmosis.rollout.v1.token_pb2 import Sample
from rollout_server.agent import Agent
from rollout_server.testing.checks import verdict
from rollout_server.testing.model.calculator import CalculatorModel
from rollout_server.testing.script import Script, ScriptedReply, tool_call
from rollout_server.tool import tool

from tests.support.bodies import body, rpc, run, start_request, tool_texts
from tests.system.conftest import Open, Service

MANY = 100


@dataclass(frozen=True)
class Sum:
    """A question with unique numbers of at least seven digits, so that a stray one is no coincidence."""

    number: int

    @property
    def a(self) -> int:
        return 1_000_003 + 1009 * self.number

    @property
    def b(self) -> int:
        return 4_000_037 + 2003 * self.number

    @property
    def results(self) -> list[str]:
        return [str(self.a + self.b), str((self.a + self.b) * (2 + self.number % 7))]

    @property
    def question(self) -> str:
        return f"Please calculate {self.a} plus {self.b}, and then multiply the result by {2 + self.number % 7}."

    def owns_all(self, text: str) -> bool:
        """Whether all large numbers in the text belong to this rollout."""
        return set(re.findall(r"\d{7,}", text)) <= {str(self.a), str(self.b), *self.results}


HTTP = {f"http/{number}": Sum(number) for number in range(MANY)}
GRPC = {f"grpc {number}": Sum(MANY + number) for number in range(MANY)}


@asynccontextmanager
async def clients(world: Service) -> AsyncIterator[aiohttp.ClientSession]:
    """An aiohttp client for all rollouts at once, because httpx slows down with the square of its connections."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(str(world.http.base_url), connector=connector) as http:
        yield http


async def over_http(world: Service, http: aiohttp.ClientSession, rollout_id: str, sum_: Sum) -> None:
    asked = body(rollout_id, world.trainer.url, sum_.question)
    async with http.post("/rollout", json=asked) as answer:
        assert answer.status == 200
        said = await answer.json()
    assert (said["rollout_id"], said["status"], said["finish_reason"]) == (rollout_id, "COMPLETED", "stop")
    assert tool_texts(said["final_messages"]) == sum_.results
    assert sum_.results[-1] in said["final_messages"][-1]["content"]
    assert sum_.owns_all(json.dumps(said["final_messages"]))
    assert "warnings" not in said["extra_fields"]


async def over_grpc(
    world: Service, stub: rollout_service_pb2_grpc.RolloutServiceAsyncStub, rollout_id: str, sum_: Sum
) -> None:
    first, *items = [item async for item in run(stub, start_request(rollout_id, world.trainer.url, sum_.question))]
    uid, events = first.started.rollout.uid, [item.event for item in items]
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    outcome = events[-1].finished.outcome
    messages = [json.loads(message.json) for message in outcome.messages]
    assert outcome.stop.reason == "stop"
    assert tool_texts(messages) == sum_.results
    assert sum_.owns_all(json.dumps(messages))
    got = await stub.GetRollout(pb.GetRolloutRequest(uid=uid, view=ROLLOUT_VIEW_SAMPLES))
    assert_same(got.rollout.outcome.samples, world.trainer.verdict(rollout_id))


def assert_same(samples: Sequence[Sample], judged: verdict.Verdict | None) -> None:
    """Assert that the server's record equals the trainer's, element by element."""
    assert judged is not None
    assert judged.accepted
    assert (len(judged.turns), judged.faults, judged.earlier) == (3, (), ())
    assert all(turn.drift is None for turn in judged.turns)
    (ours,), theirs = samples, judged.sample
    assert tuple(ours.prompt_ids) == theirs.prompt_ids
    assert tuple(ours.response_ids) == theirs.response_ids
    assert tuple(ours.response_mask) == theirs.response_mask
    assert tuple(ours.logprobs.values) == theirs.logprobs


async def listed(stub: rollout_service_pb2_grpc.RolloutServiceAsyncStub, rollout_ids: Sequence[str]) -> list[Any]:
    """All rollouts with these ids, page by page."""
    found, token = list[Any](), ""
    while True:
        selection = pb.Selection(rollout_ids=rollout_ids)
        asked = pb.ListRolloutsRequest(selection=selection, page_size=64, page_token=token, view=ROLLOUT_VIEW_SAMPLES)
        page = await stub.ListRollouts(asked)
        found.extend(page.rollouts)
        token = page.next_page_token
        if not token:
            return found


async def test_many_over_http_and_over_grpc_at_once(open_here: Open) -> None:
    world: Service = await open_here(max_running=2 * MANY)
    async with rpc(world.server.grpc_port) as stub, clients(world) as http, asyncio.TaskGroup() as group:
        for (http_id, http_sum), (grpc_id, grpc_sum) in zip(HTTP.items(), GRPC.items(), strict=True):
            group.create_task(over_http(world, http, http_id, http_sum))
            group.create_task(over_grpc(world, stub, grpc_id, grpc_sum))
    assert len(world.trainer.verdicts()) == 2 * MANY
    async with rpc(world.server.grpc_port) as stub:
        rollouts = await listed(stub, list(HTTP))
    assert sorted(rollout.spec.rollout_id for rollout in rollouts) == sorted(HTTP)
    for rollout in rollouts:
        assert_same(rollout.outcome.samples, world.trainer.verdict(rollout.spec.rollout_id))
    assert_requests_kept_apart(world)


def assert_requests_kept_apart(world: Service) -> None:
    """Assert that the trainer received each rollout's turns once, in order, under separate keys, without stray numbers."""
    keys = defaultdict[str, list[str]](list)
    for request in world.trainer.requests:
        rollout_id = request.body["rollout_id"]
        keys[rollout_id].append(request.headers["idempotency-key"])
        assert (HTTP | GRPC)[rollout_id].owns_all(json.dumps(request.body["messages"]))
    uids = set()
    for each in keys.values():
        uid = each[0].split("/")[0]
        uids.add(uid)
        assert each == [f"{uid}/0/{turn}" for turn in (1, 2, 3)]
    assert len(uids) == 2 * MANY


async def test_few_places_and_many_rollouts(open_here: Open) -> None:
    """Rollouts that wait for a slot are all run, each once."""
    world: Service = await open_here(max_running=3)
    few = dict(list(HTTP.items())[:30])
    async with clients(world) as http:
        await asyncio.gather(*(over_http(world, http, rollout_id, sum_) for rollout_id, sum_ in few.items()))
    assert {judged.rollout_id for judged in world.trainer.verdicts()} == few.keys()
    assert len(world.trainer.requests) == 3 * len(few)


class Backwards(Agent):
    """An agent whose tool calls of a turn end in reverse order."""

    name = "backwards"

    def __init__(self, calls: int) -> None:
        self._ended = [asyncio.Event() for _ in range(calls)]
        self.tools = (tool(self.place),)

    async def place(self, number: int) -> str:
        """End after the call of the next number."""
        if number + 1 < len(self._ended):
            await self._ended[number + 1].wait()
        self._ended[number].set()
        return f"place {number}"


async def test_results_keep_the_order_of_the_calls(open_here: Open) -> None:
    world: Service = await open_here(agents=[Backwards(8)], model=CalculatorModel())
    calls = tuple(tool_call(f"c{number}", "place", {"number": number}) for number in range(8))
    await world.trainer.put_script("r1", Script((ScriptedReply(tool_calls=calls), ScriptedReply(content="done"))))
    said = (await world.http.post("/rollout", json=body("r1", world.trainer.url))).json()
    results = [message for message in said["final_messages"] if message["role"] == "tool"]
    assert [(m["tool_call_id"], m["content"]) for m in results] == [(f"c{n}", f"place {n}") for n in range(8)]
    judged = world.trainer.verdict("r1")
    assert judged is not None
    assert judged.accepted
