"""The calculator of the earlier SDK's example runs in both Osmosis HTTP APIs, and the strict trainer accepts it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.sdk.calculator_agent import CalculatorAgentLoop
from tests.sdk.conftest import OpenPlace, opened

pytestmark = pytest.mark.asyncio(loop_scope="module")

DIALECTS = ("masked", "plain")


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_it_calculates(open_place: OpenPlace, dialect: str) -> None:
    place = await open_place(CalculatorAgentLoop())
    told = await place.of(dialect, "calc-1", metadata={"ground_truth": "16"})
    assert (told["status"], told["finish_reason"]) == ("COMPLETED", "stop")
    assert [message["role"] for message in told["final_messages"]] == ["user", *["assistant", "tool"] * 2, "assistant"]
    assert [m["content"] for m in told["final_messages"] if m["role"] == "tool"] == ["8", "16"]
    reward = told["extra_fields"].get("reward") if dialect == "masked" else told["reward"]
    assert reward == 1.0
    metrics = told["metrics"]
    assert (metrics["num_llm_calls"], metrics["num_tool_calls"]) == (3, 2)
    assert metrics["tool_latency_ms"] > 0
    assert place.accepted("calc-1")
    assert "warnings" not in told["extra_fields"]


async def test_every_mask_was_accepted(open_place: OpenPlace) -> None:
    place = await open_place(CalculatorAgentLoop())
    await place.masked("calc-2")
    masks = [request.body["response_mask"] for request in place.requests("calc-2")]
    assert masks[0] is None
    assert all(mask and set(mask) == {0} for mask in masks[1:])
    assert place.accepted("calc-2")


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_turn_limit_is_the_loops_own_to_keep(open_place: OpenPlace, dialect: str) -> None:
    place = await open_place(CalculatorAgentLoop())
    told = await place.of(dialect, "calc-3", max_turns=2, metadata={"ground_truth": "16"})
    assert (told["status"], told["finish_reason"]) == ("COMPLETED", "max_turns")
    assert told["final_messages"][-1]["role"] == "tool"
    assert told["metrics"]["num_llm_calls"] == 2


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_token_limit_is_seen_by_the_loop(open_place: OpenPlace, dialect: str) -> None:
    place = await open_place(CalculatorAgentLoop())
    told = await place.of(dialect, "calc-4", max_tokens_total=1, metadata={"ground_truth": "16"})
    assert (told["status"], told["finish_reason"]) == ("COMPLETED", "max_tokens")
    assert told["metrics"]["num_llm_calls"] == 1
    assert (told["extra_fields"].get("reward") if dialect == "masked" else told["reward"]) == 0.0


async def test_the_trainer_is_told_the_tools(open_place: OpenPlace) -> None:
    place = await open_place(CalculatorAgentLoop())
    tools = (await place.http.get("/tools")).json()["tools"]
    assert [tool["function"]["name"] for tool in tools] == ["add", "subtract", "multiply", "divide"]
    assert tools[0]["function"]["parameters"]["properties"]["a"] == {"type": "number", "description": "First"}
    told = (await place.start("calc-5")).json()
    assert [tool["function"]["name"] for tool in told["tools"]] == ["add", "subtract", "multiply", "divide"]
    await place.trainer.completed(place.id("calc-5"))


async def test_events_are_written_for_each_rollout(tmp_path: Path) -> None:
    async with opened(CalculatorAgentLoop(), debug_dir=str(tmp_path)) as place:
        await place.masked("calc/6")
    lines = [json.loads(line) for line in (tmp_path / "calc%2F6-0.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["pre_llm", "tool_results"] * 2 + ["pre_llm", "rollout_complete"]
    assert {line["rollout_id"] for line in lines} == {"calc/6-0"}
    assert lines[-1]["finish_reason"] == "stop"
