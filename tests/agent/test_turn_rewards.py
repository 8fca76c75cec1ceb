"""Rewards of turns that tools and plain functions give, some of them in threads."""

from __future__ import annotations

from rollout_server import Agent, Run, tool
from rollout_server.core.outcome import TurnReward, segment_rewards
from rollout_server.core.record import Rewarded

from tests.support.runtime_harness import RuntimeHarness, Say, call, outcome_of


@tool
async def hit(run: Run) -> str:
    """Hit the target."""
    run.give_reward(0.25)
    return "hit"


@tool
def miss(run: Run) -> str:
    """Miss the target, in a thread."""
    run.give_reward(-1)
    return "missed"


async def test_tools_the_loop_and_the_reward_give_rewards_to_the_latest_turn(new_world: type[RuntimeHarness]) -> None:
    class Shooter(Agent):
        name = "shooter"
        tools = (hit, miss)
        reward_rule = "own"

        def reward(self, run: Run) -> float:
            assert run.turn_rewards == {1: -0.5}
            run.give_reward(3)
            return sum(run.turn_rewards.values())

    calls = (call("hit", "a"), call("miss", "b"), call("hit", "c"))
    rollout = new_world(Shooter()).start(Say("", calls), Say("done"))
    outcome = await outcome_of(rollout)
    assert outcome.turn_rewards == (TurnReward(1, -0.5, "0"), TurnReward(2, 3.0, "0"))
    assert (outcome.reward_result.reward, segment_rewards(outcome)) == (2.5, {"0": 2.5})
    rewarded = [entry.record for entry in rollout.log.entries if isinstance(entry.record, Rewarded)]
    assert sorted(record.value for record in rewarded) == [-1.0, 0.25, 0.25, 3.0]
