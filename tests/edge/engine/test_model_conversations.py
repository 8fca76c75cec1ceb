"""`run.fork(model=...)` on a real server: conversations whose completions come from a further model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from osmosis.rollout.v1 import outcome_pb2
from rollout_client import AsyncClient, Credentials, Target, samples
from rollout_client.trainer import Prompt, Trainer, parsers
from rollout_server import Agent, Run
from rollout_server.app import Server
from rollout_server.calculator import add
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from rollout_server.testing.trainer import StrictTrainer

from tests.edge.engine.rolling import CALL, check_whole
from tests.support.engine_model import EngineModel
from tests.support.engines import MODEL, Engine, OpenaiEngine, SglangEngine, VllmEngine, serving
from tests.support.start_requests import settings
from tests.support.toy_model import END, ToyModel, by_turns, decode

KEYS = Credentials(completions_bearer="kEy-of-the-policy", model_bearers={"critic": "kEy-of-the-critic"})
QUESTION = [{"role": "user", "content": "5 plus 3?"}]
FAST: Mapping[str, Any] = {"retry_base_seconds": 0.01, "retry_max_seconds": 0.02, "retries": 1}
DIALECTS = {OpenaiEngine: "openai", VllmEngine: "vllm", SglangEngine: "sglang"}


def said(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class Criticised(Agent):
    """Answer, let the critic talk about it for two turns with a tool, and answer again. The metadata are arguments of `fork`."""

    name = "criticised"

    async def play(self, run: Run) -> None:
        await run.sample()
        critic = await run.fork([said("Criticise.")], model="critic", tools=[add], **run.metadata)  # type: ignore[arg-type]
        reply = await critic.sample(max_tokens=50)
        await critic.call(reply.tool_calls)
        await critic.append(said("So?"))
        await run.append(said((await critic.sample()).content))
        await run.sample()


class Kept(Agent):
    """A branch, a compaction and a subagent of a conversation of the critic: all have its model."""

    name = "kept"

    async def play(self, run: Run) -> None:
        critic = await run.fork([said("Criticise.")], model="critic")
        await critic.sample()
        branch = await critic.fork(role="doubter")
        await branch.append(said("Sure?"))
        await branch.sample()
        shorter = await critic.fork([said("In short.")], kind="compaction")
        await shorter.sample()
        other = await shorter.fork([said("Help.")])
        await other.sample()
        await run.sample()


class Endless(Agent):
    """Let the critic talk until it is refused."""

    name = "endless"

    async def play(self, run: Run) -> None:
        critic = await run.fork([said("Criticise.")], model="critic")
        try:
            while True:
                await critic.sample()
                await critic.append(said("And?"))
        except Exception as error:
            run.note("error", f"{type(error).__name__}: {error}")
        await run.sample()


@asynccontextmanager
async def served(**fields: Any) -> AsyncIterator[AsyncClient]:
    known = {"tokenizers": {"toy": TOY_TOKENIZER}, "tokenizers_offline": True}
    async with (
        Server([Criticised(), Kept(), Endless()], settings(**{**FAST, **known, **fields})) as server,
        AsyncClient(f"127.0.0.1:{server.grpc_port}") as client,
    ):
        yield client


def at(engine: Engine) -> Target:
    return Target(engine.url, DIALECTS[type(engine)], model=MODEL)


async def rolled(client: AsyncClient, completions: Target, critic: Target, **fields: Any) -> Any:
    """Run one rollout to its end and return it with its events."""
    fields = {"agent": "criticised", "credentials": KEYS, **fields}
    run = client.run(detail="messages", messages=QUESTION, completions=completions, models={"critic": critic}, **fields)
    events = [event async for event in run]
    return await client.get(run.uid, view="full"), events


@pytest.mark.parametrize("kind", [VllmEngine, SglangEngine])
@pytest.mark.parametrize("declared", [{}, {"role": "referee", "trainable": True}])
async def test_its_conversation_is_a_sample(kind: type[Engine], declared: dict[str, Any]) -> None:
    policy, critic = VllmEngine(EngineModel(("One.", "Two."))), kind(EngineModel((CALL, "Hm.")))
    async with served() as client, serving(policy), serving(critic):
        rollout, events = await rolled(
            client, at(policy), at(critic), metadata=declared, sampling={"temperature": 0.5, "max_tokens": 99}
        )
    assert (rollout.outcome.failure.message, rollout.outcome.metrics.turns) == ("", 4)
    first, second = samples(rollout.outcome)
    check_whole(first, policy.model.seen)
    check_whole(second, critic.model.seen)
    assert (first.role, first.model, first.trainable) == ("agent", "", True)
    trains = bool(declared)
    assert (second.role, second.model, second.trainable) == (declared.get("role", "critic"), "critic", trains)
    assert second.untrainable_reason == ("" if trains else "role_not_trainable")
    assert [segment.model for segment in rollout.outcome.segments] == ["", "critic"]
    (forked,) = [event.forked for event in events if event.HasField("forked")]
    assert (forked.model, forked.role, forked.trainable) == ("critic", second.role, trains)
    assert not any(event.HasField("model_called") for event in events)
    # Each endpoint gets its own key only, and the request's sampling parameters are the policy's.
    assert {headers["Authorization"] for headers in policy.headers} == {"Bearer kEy-of-the-policy"}
    assert {headers["Authorization"] for headers in critic.headers} == {"Bearer kEy-of-the-critic"}
    assert [body.get("temperature") for body in policy.bodies()] == [0.5, 0.5]
    assert [(body.get("temperature"), body.get("max_tokens")) for body in critic.bodies()] == [(None, 50), (None, None)]
    assert ["tools" in body for body in (*policy.bodies(), *critic.bodies())] == [False, False, True, True]
    asked = [event.asked.sampling for event in events if event.HasField("asked") and event.segment_id == "1"]
    assert [(each.HasField("temperature"), each.max_tokens) for each in asked] == [(False, 50), (False, 0)]


async def test_an_endpoint_without_ids_has_no_sample() -> None:
    policy, critic = VllmEngine(EngineModel(("One.", "Two."))), OpenaiEngine(EngineModel((CALL, "Hm.")))
    async with served() as client, serving(policy), serving(critic):
        rollout, events = await rolled(client, at(policy), at(critic))
    (sample,) = samples(rollout.outcome)
    check_whole(sample, policy.model.seen)
    assert (rollout.outcome.warnings, rollout.outcome.metrics.turns) == ([], 4)
    messages = [json.loads(event.answered.message.json)["content"] for event in events if event.HasField("answered")]
    assert (messages[0], messages[2:]) == ("One.", ["Hm.", "Two."])


async def test_branches_compactions_and_subagents_keep_the_model() -> None:
    policy, critic = VllmEngine(EngineModel(("One.",))), VllmEngine(EngineModel(("A.", "B.", "C.", "D.")))
    async with served() as client, serving(policy), serving(critic):
        rollout, _ = await rolled(client, at(policy), at(critic), agent="kept")
    found = {sample.kind: sample for sample in samples(rollout.outcome) if sample.kind != "subagent"}
    subagents = [sample for sample in samples(rollout.outcome) if sample.kind == "subagent"]
    seen = critic.model.seen
    for sample, turn in zip((subagents[0], found["branch"], found["compaction"], subagents[1]), seen, strict=True):
        check_whole(sample, [turn])
        assert (sample.model, sample.trainable) == ("critic", False)
    assert [found["branch"].role, found["compaction"].role, subagents[1].role] == ["doubter", "critic", "critic"]
    check_whole(found["main"], policy.model.seen)


async def test_a_trainer_that_counts_masks_does_not_see_it() -> None:
    critic = VllmEngine(EngineModel((CALL, "Hm.")))
    async with served() as client, serving(critic), StrictTrainer() as trainer:
        target = Target(trainer.url, "http_masked")
        rollout, _ = await rolled(client, target, at(critic), tokenizer="toy", rollout_id="r", credentials=None)
        verdict = trainer.verdict("r")
    assert (rollout.outcome.failure.message, verdict.refusals) == ("", ())
    first, second = samples(rollout.outcome)
    assert (first.prompt_ids, first.response_ids) == (
        list(verdict.sample.prompt_ids),
        list(verdict.sample.response_ids),
    )
    check_whole(second, critic.model.seen)
    assert (second.model, second.trainable) == ("critic", False)


@pytest.mark.parametrize(
    ("response", "category"),
    [
        ({"status": 401}, "CLIENT"),
        ({"status": 503}, "SERVER"),
        ({"status": 429}, "SERVER"),
        ({"status": 400, "text": "maximum context length"}, "CLIENT"),
    ],
)
async def test_a_failure_is_that_of_an_engine_never_the_trainers(response: dict[str, Any], category: str) -> None:
    critic = VllmEngine(EngineModel(("Hm.",)))
    critic.first = [web.Response(**response) for _ in range(2)]
    async with served() as client, serving(critic), StrictTrainer() as trainer:
        target = Target(trainer.url, "http_masked")
        rollout, _ = await rolled(client, target, at(critic), tokenizer="toy", rollout_id="r")
    failure = rollout.outcome.failure
    assert failure.message.startswith(f"model 'critic', in turn 2: its endpoint answered {response['status']}")
    assert failure.failure_class == outcome_pb2.FAILURE_CLASS_ENGINE
    assert failure.category == outcome_pb2.FailureCategory.Value(f"FAILURE_CATEGORY_ENGINE_{category}")
    assert "kEy" not in str(rollout)


@pytest.mark.parametrize(
    ("given", "text", "turns"),
    [
        ({"models_calls": 3}, "has used 3 calls, at most 3 are allowed (ROLLOUT_MODELS_CALLS)", 4),
        ({"models_tokens": 4}, "generated tokens, at most 4 are allowed (ROLLOUT_MODELS_TOKENS)", 2),
    ],
)
async def test_limits_of_the_model(given: dict[str, int], text: str, turns: int) -> None:
    policy, critic = VllmEngine(EngineModel(("One.",))), VllmEngine(EngineModel(("Hm.",)))
    async with served(**given) as client, serving(policy), serving(critic):
        rollout, events = await rolled(client, at(policy), at(critic), agent="endless")
    (note,) = [event.note.text for event in events if event.HasField("note")]
    assert note.startswith("AgentMistake: model 'critic': the rollout has used")
    assert text in note
    assert (rollout.outcome.stop.reason, rollout.outcome.metrics.turns) == ("stop", turns)


async def test_the_limits_of_the_rollout_count_it() -> None:
    policy, critic = VllmEngine(EngineModel(("One.",))), VllmEngine(EngineModel(("Hm.",)))
    async with served() as client, serving(policy), serving(critic):
        rollout, _ = await rolled(client, at(policy), at(critic), agent="endless", limits={"turns": 2})
    assert (rollout.outcome.stop.reason, rollout.outcome.metrics.turns) == ("max_turns", 2)
    assert (len(critic.requests), policy.requests) == (2, [])
    generated = sum(len(turn.ids) for turn in critic.model.seen)
    assert rollout.outcome.metrics.generated_tokens == generated


@pytest.mark.parametrize("metadata", [{}, {"trainable": True}])
async def test_the_trainer_library_verifies_the_other_samples(metadata: dict[str, Any]) -> None:
    critic = VllmEngine(EngineModel((CALL, "Hm.")))
    async with serving(critic), served(models=[f"critic={critic.url}|{MODEL}|vllm"]) as client:
        model = ToyModel(by_turns("One.", "Two."))
        async with Trainer(client, generate=model, decode=decode, parse=parsers.hermes, end_ids={END}) as trainer:
            rows = trainer.rollouts([Prompt(QUESTION, metadata=metadata)], n=1, tokenizer="toy", agent="criticised")
            (group,) = [each async for each in rows]
    (finished,) = group.rollouts
    assert (finished.error, finished.mismatch, finished.checked) == ("", None, not metadata)
    found = {sample.role: sample for sample in (*finished.samples, *finished.untrainable)}
    check_whole(found["critic"], critic.model.seen)
    assert found["agent"] in finished.samples
    assert (found["critic"] in finished.samples) == bool(metadata)
