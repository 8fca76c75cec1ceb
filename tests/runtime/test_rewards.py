"""Roles of forks, rewards of turns, and the rule by which rewards reach the segments."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from rollout_server import Agent, RewardResult, Run
from rollout_server.core.ledger import Role
from rollout_server.core.outcome import (
    Cancellation,
    Category,
    Failure,
    Outcome,
    RewardRule,
    Stop,
    TurnReward,
    segment_rewards,
)
from rollout_server.core.record import Rewarded
from rollout_server.runtime.errors import AgentMistake, RolloutEnded
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.start_request import Capacity

from tests.support.runtime_harness import FOREVER, RuntimeHarness, Say, assert_internal, outcome_of

HELP = {"role": "user", "content": "Help."}


def roles(outcome: Outcome) -> list[tuple[str, str, bool]]:
    return [(each.origin.kind.value, each.role.name, each.role.trainable) for each in outcome.segments]


def rewarded(rollout: Rollout) -> list[Rewarded]:
    return [entry.record for entry in rollout.log.entries if isinstance(entry.record, Rewarded)]


class Debate(Agent):
    """Several players sample at the same time. Each gets its own reward."""

    name = "debate"
    reward_rule = "own"

    async def play(self, run: Run) -> None:
        players = [await run.fork([HELP], role=f"player {n}", trainable=n != 2) for n in range(3)]
        await asyncio.gather(run.sample(), *(self._play(player, n) for n, player in enumerate(players)))

    async def _play(self, player: Run, n: int) -> None:
        for turn in range(2):
            await player.sample()
            player.give_reward(n + turn)
            await player.append(HELP)

    async def reward(self, run: Run) -> RewardResult:
        return RewardResult(reward=9.0, roles={"player 0": 0.5, "agent": 0.25, "absent": 7.0})


async def test_concurrent_forks_have_their_own_roles_and_rewards(new_world: type[RuntimeHarness]) -> None:
    outcome = await outcome_of(new_world(Debate()).start(Say("8", seconds=1)))
    assert outcome.end == Stop("stop")
    assert sorted(roles(outcome)) == [
        ("main", "agent", True),
        ("subagent", "player 0", True),
        ("subagent", "player 1", True),
        ("subagent", "player 2", False),
    ]
    given = {each.role.name: segment_rewards(outcome).get(each.id) for each in outcome.segments}
    assert given == {"agent": 0.25, "player 0": 1.5, "player 1": 3.0, "player 2": None}
    assert (outcome.reward_rule, outcome.reward_result.reward) == (RewardRule.OWN, 9.0)
    assert sum(each.value for each in outcome.turn_rewards) == 0 + 1 + 1 + 2 + 2 + 3


async def test_drift_in_a_critics_conversation_keeps_its_role(new_world: type[RuntimeHarness]) -> None:
    class Critic(Agent):
        name = "drifting"
        reward_rule = "own"

        async def play(self, run: Run) -> None:
            await run.sample()
            critic = await run.fork([HELP], role="critic", trainable=False)
            await critic.sample()
            critic.give_reward(True)
            await critic.append(HELP)
            await critic.sample()
            critic.give_reward(2)
            shorter = await critic.fork([HELP], kind="compaction")
            await shorter.sample()
            await (await shorter.fork()).sample()
            await (await shorter.fork(role="second", trainable=True)).sample()
            await (await shorter.fork([HELP])).sample()

    says = [Say("8"), Say("9", reported=(1, 2)), Say("10", reported=(7, 7, 7)), Say("11")]
    outcome = await outcome_of(new_world(Critic()).start(*says))
    assert roles(outcome) == [
        ("main", "agent", True),
        ("subagent", "critic", False),
        ("drift", "critic", False),
        ("compaction", "critic", False),
        ("branch", "critic", False),
        ("branch", "second", True),
        ("subagent", "agent", True),
    ]
    assert outcome.turn_rewards == (TurnReward(2, 1.0, "1"), TurnReward(3, 2.0, outcome.segments[2].id))
    assert segment_rewards(outcome) == {}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (float("nan"), "the reward is nan; it must be a number from -1,000,000,000 to 1,000,000,000"),
        (float("inf"), "the reward is inf"),
        (-1e10, "the reward is -10000000000.0"),
        (10**400, "the reward is 1000"),
        ("1", "the reward is '1'"),
        (None, "the reward is None"),
    ],
)
async def test_a_reward_that_is_no_number_of_bounded_size_is_refused(
    new_world: type[RuntimeHarness], value: Any, text: str
) -> None:
    class Wrong(Agent):
        name = "wrong"

        async def play(self, run: Run) -> None:
            with pytest.raises(AgentMistake, match="the conversation has no completion yet"):
                run.give_reward(1)
            await run.sample()
            with pytest.raises(AgentMistake, match=f"^give_reward: {text}"):
                run.give_reward(value)

    rollout = new_world(Wrong()).start()
    assert (await outcome_of(rollout)).end == Stop("stop")
    assert rewarded(rollout) == []


async def test_a_turn_takes_a_thousand_rewards(new_world: type[RuntimeHarness]) -> None:
    class Generous(Agent):
        name = "generous"

        async def play(self, run: Run) -> None:
            await run.sample()
            for _ in range(1000):
                run.give_reward(0.1)
            with pytest.raises(AgentMistake, match="turn 1 has 1,000 rewards already; add them up first"):
                run.give_reward(0.1)
            await run.sample()
            run.give_reward(0)

    outcome = await outcome_of(new_world(Generous()).start())
    assert outcome.turn_rewards == (TurnReward(1, 100.0, "0"), TurnReward(2, 0.0, "0"))


async def test_no_reward_after_the_end_is_decided(new_world: type[RuntimeHarness]) -> None:
    late: list[BaseException] = []

    class Late(Agent):
        name = "late"

        async def play(self, run: Run) -> None:
            await run.sample()

        async def cleanup(self, run: Run) -> None:
            try:
                run.give_reward(1)
            except RolloutEnded as ended:
                late.append(ended)

    outcome = await outcome_of(new_world(Late()).start())
    assert (len(late), outcome.turn_rewards, outcome.warnings) == (1, (), ())


@pytest.mark.parametrize("rule", list(RewardRule))
async def test_a_rollout_that_was_not_judged_has_rewards_of_turns_and_none_of_samples(
    new_world: type[RuntimeHarness], rule: RewardRule
) -> None:
    class Broken(Agent):
        name = "broken"
        reward_rule = rule.value  # type: ignore[assignment]

        async def play(self, run: Run) -> None:
            await run.sample()
            run.give_reward(1)
            await run.sample()

    failure = Failure(Category.NETWORK, "gone", 2)
    outcome = await outcome_of(new_world(Broken()).start(Say("8"), Say(failure=failure)))
    assert (outcome.turn_rewards, outcome.reward_rule) == ((TurnReward(1, 1.0, "0"),), rule)
    assert segment_rewards(outcome) == {}


async def test_a_rollout_that_is_cancelled_in_the_queue_has_the_rule_of_its_agent(
    new_world: type[RuntimeHarness],
) -> None:
    world = new_world(Debate(), capacity=Capacity(1))
    world.start(Say("8", seconds=FOREVER))
    waits = world.start()
    waits.ending.request(Cancellation("enough"))
    assert (await outcome_of(waits)).reward_rule is RewardRule.OWN


async def test_the_reward_of_a_turn_without_tokens_reaches_no_sample(new_world: type[RuntimeHarness]) -> None:
    class Silent(Agent):
        name = "silent"
        reward_rule = "own"

        async def play(self, run: Run) -> None:
            await run.sample()
            run.give_reward(1)

    rollout = new_world(Silent()).start(Say("8", tokens=0))
    outcome = await outcome_of(rollout)
    assert outcome.turn_rewards == (TurnReward(1, 1.0, "0"),)
    assert segment_rewards(outcome) == {}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": [HELP], "role": ""}, "role is ''; it must be a non-blank text of 1 to 256 characters"),
    ({"messages": [HELP], "role": " \n"}, "role is ' \\\\n'"),
    ({"messages": [HELP], "role": "x" * 257}, "role is 'xxx"),
    ({"messages": [HELP], "role": 7}, "role is 7"),
    ({"messages": [HELP], "role": "\ud800"}, "role is '\\\\ud800'"),
    ({"messages": [HELP], "trainable": 1}, "trainable is 1; it must be True or False"),
    ({"messages": [HELP], "kind": "compaction", "role": "critic"}, "keeps its role; leave out role and trainable"),
    ({"messages": [HELP], "kind": "compaction", "trainable": True}, "keeps its role; leave out role and trainable"),
]


@pytest.mark.parametrize(("arguments", "text"), WRONG)
async def test_a_role_that_makes_no_sense_is_refused(
    new_world: type[RuntimeHarness], arguments: dict[str, Any], text: str
) -> None:
    class Wrong(Agent):
        name = "wrong"

        async def play(self, run: Run) -> None:
            with pytest.raises(AgentMistake, match=text):
                await run.fork(**arguments)
            await (await run.fork([HELP], role="ü" * 256)).sample()

    outcome = await outcome_of(new_world(Wrong()).start())
    assert outcome.end == Stop("stop")
    assert [segment.role for segment in outcome.segments] == [Role("ü" * 256)]


BAD_RESULTS: list[tuple[RewardResult, str]] = [
    (RewardResult(1.0, roles={"critic": float("nan")}), "role 'critic', returned nan, which is not a finite number"),
    (RewardResult(1.0, roles={"": 1.0}), "a role's name is a text of 1 to 256 characters, not ''"),
    (RewardResult(1.0, roles=[1.0]), "roles are a dictionary of at most 1000 numbers, not [1.0]"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("result", "text"), BAD_RESULTS)
async def test_rewards_of_roles_are_checked(
    new_world: type[RuntimeHarness], result: RewardResult, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Judge(Agent):
        name = "judge"
        reward_rule = "own"

        async def reward(self, run: Run) -> RewardResult:
            return result

    assert_internal(await outcome_of(new_world(Judge()).start()))
    assert text in caplog.text
    assert "test_rewards.py:" in caplog.text


async def test_rewards_of_roles_need_the_rule_own(
    new_world: type[RuntimeHarness], caplog: pytest.LogCaptureFixture
) -> None:
    class Judge(Agent):
        name = "judge"

        async def reward(self, run: Run) -> RewardResult:
            return RewardResult(1.0, roles={"critic": 1.0})

    assert_internal(await outcome_of(new_world(Judge()).start()))
    assert 'rewards of roles reach samples only with reward_rule = "own", it is "copy"' in caplog.text


def test_an_unknown_rule_is_refused_when_the_class_is_defined() -> None:
    with pytest.raises(ValueError, match="class Wrong: reward_rule is 'each'; it must be one of copy, split, own"):

        class Wrong(Agent):
            name = "wrong"
            reward_rule = "each"  # type: ignore[assignment]
