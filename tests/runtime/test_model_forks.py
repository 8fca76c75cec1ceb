"""`run.fork(model=...)`: records that replay, keys, arguments that do not fit, and completions that nobody waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from rollout_server import Agent, Run
from rollout_server.core.ledger import Role
from rollout_server.core.outcome import Category, Failure, FailureClass, Stop
from rollout_server.core.record import Asked, Forked, GivenUp
from rollout_server.core.spec import Dialect, Sampling, Spec, Target
from rollout_server.runtime.errors import AgentMistake
from rollout_server.runtime.models import ModelCompletion, ModelEndpoint, ModelLimits
from rollout_server.runtime.ports import CompletionRequest, Credentials, Sampler, Tool
from rollout_server.runtime.start_request import StartRequest

from tests.support.runtime_harness import FOREVER, RuntimeHarness, Say, Script, a_spec, outcome_of

HELP = {"role": "user", "content": "Help."}
CRITIC = Target("http://critic", Dialect.VLLM, model="large")


class ScriptedModels:
    """Further models whose conversations have one script."""

    endpoints: Mapping[str, ModelEndpoint] = {"critic": ModelEndpoint(CRITIC, "kEy")}
    limits = ModelLimits()

    def __init__(self, *says: Say) -> None:
        self.script = Script(*says)
        self.opened: list[Target] = []

    async def complete(self, target: Target, request: CompletionRequest) -> ModelCompletion:
        raise NotImplementedError

    def open(self, target: Target, spec: Spec, tools: Sequence[Tool]) -> Sampler:
        self.opened.append(target)
        return self.script


async def test_the_records_carry_the_model_and_replay(new_world: type[RuntimeHarness]) -> None:
    class Critical(Agent):
        name = "critical"

        async def play(self, run: Run) -> None:
            await run.sample()
            critic = await run.fork([HELP], model="critic")
            await critic.sample()
            branch = await critic.fork()
            await branch.append(HELP)
            await branch.sample(temperature=0.5)
            await (await branch.fork([HELP], kind="compaction")).sample()
            await run.sample()

    models = ScriptedModels(Say("Hm."))
    world = new_world(Critical(), models=models)
    spec = a_spec(sampling=Sampling(temperature=1.0))
    world.scripts[spec.rollout_id] = Script(Say("8"))
    rollout, _ = world.wish(StartRequest(spec, "me", credentials=Credentials("kEy-of-the-trainer")))
    outcome = await outcome_of(rollout)  # replays the records
    assert outcome.end == Stop("stop")
    forks = [entry.record for entry in rollout.log.entries if isinstance(entry.record, Forked)]
    assert [each.role for each in forks] == [Role("critic", trainable=False, model="critic")] * 3
    assert [segment.role.model for segment in outcome.segments] == ["", "critic", "critic", "critic"]
    asked = [entry.record for entry in rollout.log.entries if isinstance(entry.record, Asked)]
    given = [None, Sampling(), Sampling(temperature=0.5), Sampling(), None]
    assert [(each.turn, each.sampling) for each in asked] == list(enumerate(given, start=1))
    # The trainer's sampler never saw the conversation, and its key went nowhere else.
    ours, theirs = world.script(rollout), models.script
    assert (ours.forks, len(ours.asks), models.opened) == ([], 2, [CRITIC])
    assert {ask.credentials.secrets() for ask in ours.asks} == {("kEy-of-the-trainer",)}
    assert {ask.credentials.secrets() for ask in theirs.asks} == {("kEy",)}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "fork: a branch keeps the model of its conversation; leave out model='critic'"),
        ({"messages": [HELP], "kind": "compaction"}, "fork: a compaction keeps the model of its conversation"),
        ({"messages": [], "kind": "subagent"}, "fork: a subagent needs its initial messages"),
        ({"messages": [HELP], "model": "critik"}, "model: there is no model 'critik'; there are critic"),
        ({"messages": [HELP], "model": ""}, "model: there is no model ''"),
        ({"messages": [HELP], "model": ["critic"]}, "fork: model is ['critic']; it must be the name"),
    ],
)
async def test_arguments_that_do_not_fit(new_world: type[RuntimeHarness], given: dict[str, Any], text: str) -> None:
    found = []

    class Wrong(Agent):
        name = "wrong"

        async def play(self, run: Run) -> None:
            with pytest.raises(AgentMistake) as mistake:
                await run.fork(**{"model": "critic", **given})
            found.append(str(mistake.value))
            await run.sample()

    models = ScriptedModels()
    outcome = await outcome_of(new_world(Wrong(), models=models).start())
    assert (outcome.end, models.opened) == (Stop("stop"), [])
    assert found[0].startswith(text)


async def test_an_abandoned_completion_closes_its_conversation_alone(new_world: type[RuntimeHarness]) -> None:
    class Impatient(Agent):
        name = "impatient"

        async def play(self, run: Run) -> None:
            critic = await run.fork([HELP], model="critic")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(critic.sample(), 1)
            await run.sample()

    rollout = new_world(Impatient(), models=ScriptedModels(Say(seconds=FOREVER))).start()
    outcome = await outcome_of(rollout)
    assert outcome.end == Stop("stop")
    assert [entry.record for entry in rollout.log.entries if isinstance(entry.record, GivenUp)] == [GivenUp(1, "1")]


@pytest.mark.parametrize("source", [FailureClass.TRAINER, FailureClass.POLICY, None])
async def test_whatever_fails_there_is_the_engines(
    new_world: type[RuntimeHarness], source: FailureClass | None
) -> None:
    class Critical(Agent):
        name = "critical"

        async def play(self, run: Run) -> None:
            await (await run.fork([HELP], model="critic")).sample()

    failed = Failure(Category.VALIDATION, "turn 1: the engine sent nonsense", 1, source=source)
    models = ScriptedModels(Say(failure=failed))
    end = (await outcome_of(new_world(Critical(), models=models).start())).end
    assert isinstance(end, Failure)
    assert (end.category, end.failure_class) == (Category.ENGINE_CLIENT, FailureClass.ENGINE)
    assert end.message == "model 'critic', in turn 1: its endpoint sent nonsense"
