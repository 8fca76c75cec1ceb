"""Rollouts of loops beside each other, and what watchers see of them."""

from __future__ import annotations

import asyncio

import pytest
from rollout_client import AsyncClient
from rollout_server.sdk import RolloutContext, RolloutRequest, RolloutResult
from rollout_server.sdk.core.schemas import OpenAIFunctionToolSchema

from tests.sdk.calculator_agent import SCHEMAS, CalculatorAgentLoop
from tests.sdk.conftest import QUESTION, OpenPlace
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


async def test_tools_of_one_request_that_nobody_was_told_of_are_remarked(open_place: OpenPlace) -> None:
    class Fewer(CalculatorAgentLoop):
        def get_tools(self, request: RolloutRequest) -> list[OpenAIFunctionToolSchema]:
            return SCHEMAS[:2]

    seen = await notes(await open_place(Fewer()), "fewer")
    assert seen[0][0] == "tools_not_told"


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
    )
    assert (told["status"], told["metrics"]["num_llm_calls"]) == ("COMPLETED", 0)
    [request] = seen
    assert request.rollout_id == place.id("asked")
    assert request.server_url == place.trainer.url
    assert request.messages == [{"role": "user", "content": "Hi", "vendor": {"n": 2**70}}]
    params = {"temperature": 0.5, "top_p": 1.0, "max_tokens": 512, "logprobs": True, "stop": ["END"], "seed": 7}
    assert request.completion_params == params
    assert (request.max_turns, request.max_tokens_total) == (3, 99)
    assert request.metadata == {"ground_truth": "16", "nested": {"a": [1]}}
    assert "trainer-key" not in repr(request)
    assert request.api_key is None
