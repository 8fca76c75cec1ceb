"""Several conversations in one rollout: engines remember nothing, so each goes its own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from rollout_client import AsyncClient, samples

from tests.engines.model import ToyModel
from tests.engines.rolling import SQUEEZED, check_whole, roll, warned
from tests.engines.served import Engine, SglangEngine, VllmEngine, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
MODES: dict[str, dict[str, Any]] = {
    "messages": {},
    "predicted": {"tokenizer": "t"},
    "tokens": {"token_mode": "tokens", "tokenizer": "t"},
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("kind", [VllmEngine, SglangEngine])
async def test_each_conversation_is_a_sample_of_its_own(
    client: AsyncClient, kind: Callable[[ToyModel], Engine], mode: dict[str, Any]
) -> None:
    engine = kind(ToyModel(["Well.", "On.", "Or.", SQUEEZED]))
    async with serving(engine):
        outcome = await roll(client, engine, agent="parts", **mode)
    assert (outcome.stop.reason, warned(outcome)) == ("stop", [])
    first, on, other, helped = engine.model.seen
    told = {sample.kind: sample for sample in samples(outcome)}
    check_whole(told["main"], [first, on])
    check_whole(told["branch"], [other])
    check_whole(told["subagent"], [helped])
    assert told["branch"].parent_tokens == len(first.prompt) + len(first.ids)
    assert other.prompt == on.prompt
    tools = [[tool["function"]["name"] for tool in body["tools"]] for body in engine.bodies() if "tools" in body]
    if kind is SglangEngine or not mode.get("token_mode"):
        assert tools == [["add"], ["add"], ["add"], ["multiply"]]
