"""Faulty agents: each of their rollouts has one outcome, and its slot becomes free."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from rollout_server import Agent, Limits, RewardResult, Run
from rollout_server.core.outcome import Category, Failure, Stop
from rollout_server.core.record import Note
from rollout_server.runtime.errors import AgentMistake

from tests.support.runtime_harness import (
    FOREVER,
    SECRET,
    RuntimeHarness,
    Say,
    assert_internal,
    call,
    contents,
    outcome_of,
)


class Crashing(Agent):
    """Fail in the given method."""

    name = "crashing"

    async def play(self, run: Run) -> None:
        await run.sample()
        if run.metadata["in"] == "play":
            raise LookupError(SECRET)

    async def reward(self, run: Run) -> float:
        if run.metadata["in"] == "reward":
            raise LookupError(SECRET)
        return float("nan")


@pytest.mark.parametrize("part", ["play", "reward", "verdict"])
async def test_an_agents_failure_is_internal_and_shows_no_insides(
    new_world: type[RuntimeHarness], part: str, caplog: pytest.LogCaptureFixture
) -> None:
    rollout = new_world(Crashing()).start(Say("8"), metadata_json=f'{{"in": "{part}"}}')
    outcome = await outcome_of(rollout)
    assert_internal(outcome)
    assert rollout.uid in outcome.end.message  # type: ignore[union-attr]
    assert contents(outcome, "assistant") == ["8"]
    assert outcome.metrics.turns == 1
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.exc_info is not None
    assert record.rollout_uid == rollout.uid  # type: ignore[attr-defined]
    assert (SECRET in caplog.text) == (part != "verdict")


async def test_a_sampler_that_fails_unclassified_is_internal(new_world: type[RuntimeHarness]) -> None:
    outcome = await outcome_of(new_world().start(Say(error=LookupError(SECRET))))
    assert_internal(outcome)


async def test_the_end_passes_an_agents_except_exception(new_world: type[RuntimeHarness]) -> None:
    caught: list[Exception] = []

    class Careful(Agent):
        name = "careful"

        async def play(self, run: Run) -> None:
            while True:
                try:
                    await run.sample()
                except Exception as error:
                    caught.append(error)

    outcome = await outcome_of(new_world(Careful()).start(limits=Limits(turns=3)))
    assert outcome.end == Stop("max_turns")
    assert caught == []


async def test_a_verdict_is_part_of_the_outcome(new_world: type[RuntimeHarness]) -> None:
    class Judging(Agent):
        name = "judging"

        async def reward(self, run: Run) -> RewardResult:
            return RewardResult(len(run.messages), {"turns": run.turn}, '{"why": "so"}')

    outcome = await outcome_of(new_world(Judging()).start())
    assert outcome.reward_result == RewardResult(2, {"turns": 1}, '{"why": "so"}')


async def test_only_a_rollout_that_came_to_its_end_is_judged(new_world: type[RuntimeHarness]) -> None:
    class Judging(Agent):
        name = "judging"

        async def reward(self, run: Run) -> float:
            return 1.0

    world = new_world(Judging())
    failed = world.start(Say(failure=Failure(Category.NETWORK, "nobody there")))
    stopped = world.start(limits=Limits(turns=1))
    assert (await outcome_of(failed)).reward_result == RewardResult()
    assert (await outcome_of(stopped)).reward_result == RewardResult(1.0)


async def test_mistakes_of_an_agent_are_told_to_it(new_world: type[RuntimeHarness]) -> None:
    told: list[str] = []

    class Hasty(Agent):
        name = "hasty"

        async def play(self, run: Run) -> None:
            first = asyncio.create_task(run.sample())
            await asyncio.sleep(1)
            for hasty in (run.sample(), run.append({"role": "user", "content": "x"}), run.call([]), run.finish()):
                try:
                    await hasty
                except AgentMistake as mistake:
                    told.append(str(mistake))
            await first
            wrongs: Any = (
                {"content": "no role"},
                {"role": "user", "content": float("nan")},
                {"role": "user", "content": {1}},
            )
            for wrong in wrongs:
                try:
                    await run.append(wrong)
                except AgentMistake as mistake:
                    told.append(str(mistake))

    outcome = await outcome_of(new_world(Hasty()).start(Say("8", seconds=60)))
    assert outcome.end == Stop("stop")
    assert [text.partition(":")[0] for text in told] == ["the rollout is asking in turn 1"] * 4 + ["not a message"] * 3


async def test_what_an_agent_sees_of_its_rollout(new_world: type[RuntimeHarness]) -> None:
    seen: list[object] = []

    class Looking(Agent):
        name = "looking"

        async def play(self, run: Run) -> None:
            seen.extend((run.uid, run.rollout_id, run.turn, run.cancelled, run.metadata, list(run.messages)))
            reply = await run.sample()
            seen.extend((run.turn, reply.content, reply.finish_reason, reply.message["role"]))

    rollout = new_world(Looking()).start(
        Say("8", finish_reason="length"), rollout_id="mine/1", metadata_json='{"a": [1]}'
    )
    await outcome_of(rollout)
    user = {"role": "user", "content": "5 + 3?"}
    assert seen == [rollout.uid, "mine/1", 0, False, {"a": [1]}, [user], 1, "8", "length", "assistant"]


async def test_an_agent_that_stops_waiting_for_an_answer_cannot_go_on(new_world: type[RuntimeHarness]) -> None:
    class Impatient(Agent):
        name = "impatient"

        async def play(self, run: Run) -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(10):
                    await run.sample()
            await run.sample()

    world = new_world(Impatient())
    rollout = world.start(Say("8", seconds=60))
    outcome = await outcome_of(rollout)
    assert isinstance(outcome.end, Failure)
    assert outcome.end.category is Category.INTERNAL
    assert "cancelled the completion request" in outcome.end.message
    assert len(world.script(rollout).asks) == 1


async def test_an_agent_may_leave_remarks_while_its_calls_run(new_world: type[RuntimeHarness]) -> None:
    class Chatty(Agent):
        name = "chatty"

        async def play(self, run: Run) -> None:
            calls = (await run.sample()).tool_calls
            async with asyncio.TaskGroup() as group:
                group.create_task(run.call(calls))
                await asyncio.sleep(0)
                run.note("chat", "while they run")

    rollout = new_world(Chatty()).start(Say("", (call("nothing"),)))
    assert (await outcome_of(rollout)).end == Stop("stop")
    assert [entry.record.text for entry in rollout.log.entries if isinstance(entry.record, Note)] == ["while they run"]


async def test_an_error_that_gives_up_an_open_question_is_in_the_servers_log(
    new_world: type[RuntimeHarness], caplog: pytest.LogCaptureFixture
) -> None:
    class Grouping(Agent):
        name = "grouping"

        async def play(self, run: Run) -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(run.sample())
                await asyncio.sleep(1)
                raise LookupError(SECRET)

    assert_internal(await outcome_of(new_world(Grouping()).start(Say(seconds=FOREVER))))
    assert SECRET in caplog.text


async def test_an_agent_that_cancels_itself_fails(new_world: type[RuntimeHarness]) -> None:
    class Quitting(Agent):
        name = "quitting"

        async def play(self, run: Run) -> None:
            raise asyncio.CancelledError

    assert_internal(await outcome_of(new_world(Quitting()).start()))


async def test_a_reward_cannot_go_on_with_the_rollout(new_world: type[RuntimeHarness]) -> None:
    """Tokens sampled there would be trained."""

    class Greedy(Agent):
        name = "greedy"

        async def reward(self, run: Run) -> float:
            await run.sample()
            return 1.0

    outcome = await outcome_of(new_world(Greedy()).start(Say("8"), Say("more")))
    assert_internal(outcome)
    assert outcome.metrics.turns == 1
