"""Several conversations in one rollout: engines are stateless, so the conversations are independent."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from rollout_client import AsyncClient, samples

from tests.edge.engine.rolling import SQUEEZED, check_once, check_whole, roll, warned
from tests.support.engine_model import EngineModel
from tests.support.engines import Engine, OpenaiEngine, SglangEngine, VllmEngine, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
MODES: dict[str, dict[str, Any]] = {
    "messages": {},
    "predicted": {"tokenizer": "t"},
    "tokens": {"token_mode": "tokens", "tokenizer": "t"},
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("kind", [VllmEngine, SglangEngine])
async def test_each_conversation_is_a_sample_of_its_own(
    client: AsyncClient, kind: Callable[[EngineModel], Engine], mode: dict[str, Any]
) -> None:
    engine = kind(EngineModel(["Well.", "On.", "Or.", SQUEEZED]))
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


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("kind", [VllmEngine, SglangEngine])
@pytest.mark.parametrize("squeezed", [False, True], ids=["exact", "drifting"])
async def test_each_answer_trains_once_in_a_tree_of_branches(
    client: AsyncClient, kind: Callable[[EngineModel], Engine], mode: dict[str, Any], squeezed: bool
) -> None:
    """If the engine renders, the parsed call differs from the sampled tokens.

    A conversation that continues from it opens a new segment.
    """
    texts = [f"Answer {n}." for n in range(10)]
    if squeezed:
        texts[1] = texts[3] = SQUEEZED
    engine = kind(EngineModel(texts))
    async with serving(engine):
        outcome = await roll(client, engine, agent="tree", **mode)
    assert (outcome.failure.message, outcome.stop.reason, len(engine.model.seen)) == ("", "stop", 10)
    found = samples(outcome)
    check_once(found, engine.model.seen)
    drifts = squeezed and "token_mode" not in mode
    assert set(warned(outcome)) == ({"token_drift"} if drifts else set())
    if not drifts:
        assert sorted(sample.kind for sample in found) == ["branch"] * 4 + ["compaction", "main"]
    whole = {sample.segment_id: [*sample.prompt_ids, *sample.response_ids] for sample in found}
    for sample in found:
        shared = whole[sample.parent_id][: sample.parent_tokens] if sample.parent_tokens else []
        assert whole[sample.segment_id][: len(shared)] == shared


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("kind", [VllmEngine, SglangEngine])
@pytest.mark.parametrize("squeezed", [False, True], ids=["exact", "drifting"])
async def test_branches_after_an_earlier_completion(
    client: AsyncClient, kind: Callable[[EngineModel], Engine], mode: dict[str, Any], squeezed: bool
) -> None:
    texts = [SQUEEZED if squeezed and n in (0, 1) else f"Answer {n}." for n in range(11)]
    engine = kind(EngineModel(texts))
    async with serving(engine):
        outcome = await roll(client, engine, agent="earlier", **mode)
    assert (outcome.failure.message, outcome.stop.reason, len(engine.model.seen)) == ("", "stop", 11)
    found = samples(outcome)
    check_once(found, engine.model.seen)
    if squeezed and "token_mode" not in mode:
        return
    assert warned(outcome) == []
    assert sorted(sample.kind for sample in found) == ["branch"] * 3 + ["main"]
    first = engine.model.seen[0]
    shared = [*first.prompt, *first.ids]
    for sample in found:
        assert [*sample.prompt_ids, *sample.response_ids][: len(shared)] == shared
        assert sample.parent_tokens == (len(shared) if sample.kind == "branch" else 0)


@pytest.mark.parametrize(("kind", "mode"), [*product((VllmEngine, SglangEngine), MODES.values()), (OpenaiEngine, {})])
async def test_a_prompt_that_is_too_long_is_told_to_an_agent_that_can_shorten_it(
    client: AsyncClient, kind: Callable[[EngineModel], Engine], mode: dict[str, Any]
) -> None:
    engine = kind(EngineModel(["Well.", "Done."]))
    engine.model.context = 120
    async with serving(engine):
        outcome = await roll(client, engine, agent="shortening", sampling={"max_tokens": 5}, **mode)
    assert (outcome.failure.message, outcome.stop.reason) == ("", "stop")
    tokens, maximum = json.loads(outcome.extra_json)["said"]
    if kind is OpenaiEngine:
        assert (tokens, maximum) == (None, None)
    else:
        assert maximum == 120
        assert tokens > 100
        check_once(samples(outcome), engine.model.seen)
        origins = [(sample.kind, sample.parent_tokens) for sample in samples(outcome)]
        assert origins == [("main", 0), ("compaction", 0)]
