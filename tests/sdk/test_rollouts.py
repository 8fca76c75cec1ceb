"""Concurrent rollouts of loops, and the events that watchers receive."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from rollout_client import AsyncClient, Target
from rollout_server.sdk import RolloutContext, RolloutRequest, RolloutResult, as_agent
from rollout_server.sdk.core.schemas import OpenAIFunctionToolSchema

from tests.sdk.calculator_agent import SCHEMAS, CalculatorAgentLoop
from tests.sdk.conftest import QUESTION, OpenPlace, opened
from tests.sdk.loops import Loop, say

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def notes(place: object, rollout_id: str) -> list[tuple[str, str]]:
    """The notes among a rollout's events."""
    messages = [{"role": "user", "content": QUESTION}]
    async with AsyncClient(f"127.0.0.1:{place.server.grpc_port}") as client:  # type: ignore[attr-defined]
        url = f"grpc://{place.trainer.grpc_target}"  # type: ignore[attr-defined]
        events = [each async for each in client.run(messages=messages, completions=url, rollout_id=rollout_id)]
    return [(event.note.code, event.note.text) for event in events if event.HasField("note")]


async def test_many_at_once_do_not_mix(open_place: OpenPlace) -> None:
    place = await open_place(CalculatorAgentLoop())
    sums = range(1, 11)

    async def play(number: int) -> tuple[dict[str, object], ...]:
        messages = [{"role": "user", "content": f"Please calculate {number} plus {number}."}]
        more = {"messages": messages, "metadata": {"ground_truth": str(2 * number)}}
        return await asyncio.gather(place.masked(f"m{number}", **more), place.plain(f"p{number}", **more))

    for number, told in zip(sums, await asyncio.gather(*map(play, sums)), strict=True):
        for each in told:
            assert each["status"] == "COMPLETED"
            messages = each["final_messages"]
            assert isinstance(messages, list)
            assert [m["content"] for m in messages if m["role"] == "tool"] == [str(2 * number)]
        assert place.accepted(f"m{number}")
        assert place.accepted(f"p{number}")


async def test_events_of_the_loop_are_notes(open_place: OpenPlace) -> None:
    place = await open_place(CalculatorAgentLoop())
    seen = await notes(place, place.id("notes"))
    assert [code for code, _ in seen] == ["pre_llm", "tool_results"] * 2 + ["pre_llm", "rollout_complete"]
    assert '"num_messages": 1' in seen[0][1]


async def test_a_loop_that_floods_its_log_is_cut(open_place: OpenPlace) -> None:
    async def play(ctx: RolloutContext) -> RolloutResult:
        for number in range(1500):
            ctx.log_event("flood", number=number, text="x" * 5000)
        messages, _ = await say(ctx)
        return ctx.complete(messages)

    seen = await notes(await open_place(Loop(play, SCHEMAS)), "flood")
    assert len(seen) == 1000
    assert max(len(text) for _, text in seen) == 2000


class Fewer(CalculatorAgentLoop):
    """Return as many tools as the request says; `told` holds those that the loop received."""

    def __init__(self) -> None:
        self.told: list[list[str]] = []
        self.asked = 0

    def get_tools(self, request: RolloutRequest) -> list[OpenAIFunctionToolSchema]:
        self.asked += 1
        return SCHEMAS[: request.metadata.get("tools", 4)]

    async def run(self, ctx: RolloutContext) -> RolloutResult:
        self.told.append([tool.function.name for tool in ctx.tools])
        return await super().run(ctx)


async def test_the_model_is_told_the_tools_of_its_request(open_place: OpenPlace) -> None:
    loop = Fewer()
    place = await open_place(loop)
    for count in (2, 0, 4):
        outcome = await place.over_grpc(f"fewer-{count}", metadata={"tools": count})
        assert outcome.stop.reason == "stop", outcome
        first = next(
            each for each in place.trainer.completions if each.request.rollout_id == place.id(f"fewer-{count}")
        )
        names = [schema.function.name for schema in SCHEMAS[:count]]
        assert [tool.name for tool in first.request.tools.tools] == names
        assert loop.told[-1] == names
    assert loop.asked == 3


async def test_the_answer_to_a_start_lists_the_tools_of_its_request(open_place: OpenPlace) -> None:
    loop = Fewer()
    place = await open_place(loop)
    answer = await place.start("few", metadata={"tools": 1})
    names = [tool["function"]["name"] for tool in answer.json()["tools"]]
    assert (await place.trainer.completed(place.id("few")))["status"] == "COMPLETED"
    assert [names] == loop.told == [[SCHEMAS[0].function.name]]


async def test_a_trainer_that_knows_one_list_of_tools_is_told_no_other(open_place: OpenPlace) -> None:
    """In the synchronous HTTP API the loop has its own tools, and a note reports that the model has others."""
    loop = Fewer()
    place = await open_place(loop)
    target = Target(place.trainer.url, "http_masked")
    more: Any = {"tokenizer": "toy", "metadata": {"tools": 2}}
    messages = [{"role": "user", "content": QUESTION}]
    async with AsyncClient(f"127.0.0.1:{place.server.grpc_port}") as client:
        run = client.run(messages=messages, completions=target, rollout_id=place.id("one-list"), **more)
        events = [each async for each in run]
    assert events[-1].finished.outcome.stop.reason == "stop", events[-1]
    assert loop.told == [[schema.function.name for schema in SCHEMAS[:2]]]
    assert place.accepted("one-list")
    assert "tools_not_told" in [each.note.code for each in events]


async def test_a_loop_that_needs_a_request_to_tell_its_tools_is_served(caplog: pytest.LogCaptureFixture) -> None:
    class Needing(CalculatorAgentLoop):
        def get_tools(self, request: RolloutRequest) -> list[OpenAIFunctionToolSchema]:
            return SCHEMAS[: request.metadata["tools"]]

    async with opened(Needing()) as place:
        assert (await place.http.get("/tools")).json() == {"tools": []}
        answer = await place.start("needing", metadata={"tools": 3})
        assert len(answer.json()["tools"]) == 3
        assert (await place.trainer.completed(place.id("needing")))["status"] == "COMPLETED"

    class Knowing(Needing):
        def get_default_tools(self) -> list[OpenAIFunctionToolSchema]:
            return SCHEMAS[:1]

    assert [tool.name for tool in as_agent(Knowing()).tools] == ["add"]
    assert "Needing.get_tools (" in caplog.text
    assert "KeyError: 'tools'" in caplog.text


async def test_a_request_is_what_was_asked_for(open_place: OpenPlace) -> None:
    seen: list[RolloutRequest] = []

    async def play(ctx: RolloutContext) -> RolloutResult:
        seen.append(ctx.request)
        return ctx.complete(list(ctx.request.messages))

    place = await open_place(Loop(play))
    told = await place.plain(
        "asked",
        messages=[{"role": "user", "content": "Hi", "vendor": {"n": 2**70}}],
        completion_params={"temperature": 0.5, "stop": "END", "seed": 7},
        max_turns=3,
        max_tokens_total=99,
        metadata={"ground_truth": "16", "nested": {"a": [1]}},
        api_key="trainer-key",
        idempotency_key="once",
        tool_server_url="http://tools.example",
    )
    assert (told["status"], told["metrics"]["num_llm_calls"]) == ("COMPLETED", 0)
    [request] = seen
    assert request.rollout_id == place.id("asked")
    assert request.server_url == place.trainer.url
    assert request.messages == [{"role": "user", "content": "Hi", "vendor": {"n": 2**70}}]
    assert request.completion_params == {"temperature": 0.5, "stop": "END", "seed": 7}
    assert (request.idempotency_key, request.tool_server_url) == ("once", "http://tools.example")
    assert (request.max_turns, request.max_tokens_total) == (3, 99)
    assert request.metadata == {"ground_truth": "16", "nested": {"a": [1]}}
    assert "trainer-key" not in repr(request)
    assert request.api_key is None
