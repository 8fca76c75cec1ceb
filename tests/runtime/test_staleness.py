"""Rollouts that are cancelled because their oldest tokens lag too far behind the newest policy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

import pytest
from rollout_server import Agent, Run, tool
from rollout_server.core.outcome import Cancellation, Category, Failure, FailureClass, Outcome, Stop
from rollout_server.core.spec import StaleAction, Staleness
from rollout_server.runtime.policy import PolicyUpdate
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.start_request import Capacity

from tests.support.group_harness import GroupHarness, Ranked
from tests.support.runtime_harness import ME, RuntimeHarness, Say, call, outcome_of

World = Callable[..., RuntimeHarness]
TWO = Staleness(2, StaleAction.CANCEL)
NAP = (call("nap"),)


class Napping(Agent):
    """The default loop with a tool that sleeps. The reward and the cleanup take five seconds, too."""

    name = "napping"

    def __init__(self) -> None:
        self.naps, self.rewarded = 0, 0
        self.tools = (tool(self.nap),)

    async def nap(self) -> str:
        """Sleeps for five seconds."""
        await asyncio.sleep(5)
        self.naps += 1
        return "slept"

    async def reward(self, run: Run) -> float:
        await asyncio.sleep(5)
        self.rewarded += 1
        return 1.0


class Quick(Agent):
    """The default loop and a reward, which is there at once."""

    name = "quick"

    async def reward(self, run: Run) -> float:
        return 1.0


class Cleaning(Quick):
    """Needs five seconds after its end is decided."""

    name = "cleaning"

    async def cleanup(self, run: Run) -> None:
        await asyncio.sleep(5)


class Lingering(Agent):
    """The default loop, and two seconds more after its end."""

    name = "lingering"

    async def play(self, run: Run) -> None:
        try:
            await super().play(run)
        finally:
            await asyncio.sleep(2)


class Masking(Agent):
    """Masks its first completion out, and samples four more times."""

    name = "masking"

    async def play(self, run: Run) -> None:
        run.mask(await run.sample(), "warm-up")
        for _ in range(4):
            await run.append({"role": "user", "content": "Go on."})
            await run.sample()


def step(number: int, **update: bool) -> PolicyUpdate:
    return PolicyUpdate(step=number, **update)


def asked(world: RuntimeHarness, rollout: Rollout) -> int:
    """The number of completions that were requested for a rollout."""
    return len(world.script(rollout).asks)


def reason(outcome: Outcome) -> str:
    assert isinstance(outcome.end, Cancellation)
    return outcome.end.reason


async def test_a_rollout_in_a_tool_is_cancelled_on_the_announcement(new_world: World) -> None:
    agent = Napping()
    world = new_world(agent)
    rollout = world.start(Say(calls=NAP, step=3), Say("done", step=3), staleness=TWO)
    await asyncio.sleep(1)
    assert world.roster.policies.announce("me", step(5)) == []
    assert world.roster.policies.announce("other", step(9)) == []
    assert world.roster.policies.announce("me", step(6)) == [rollout.uid]
    assert world.roster.policies.announce("me", step(7)) == []  # it is cancelled already
    outcome = await outcome_of(rollout)
    assert reason(outcome) == "stale: the oldest token is of policy step 3, 3 behind; at most 2 are allowed"
    assert (asked(world, rollout), agent.naps, outcome.policy_step) == (1, 0, 7)


async def test_one_that_waits_for_its_trainer_gives_its_request_up(new_world: World) -> None:
    world = new_world()
    rollout = world.start(Say(calls=(call("none"),), step=1), Say("done", step=1, seconds=100), staleness=TWO)
    await asyncio.sleep(1)
    assert asked(world, rollout) == 2
    assert world.roster.policies.announce("me", step(4)) == [rollout.uid]
    await asyncio.sleep(1)
    assert reason(await outcome_of(rollout)).startswith("stale")


async def test_no_turn_of_a_stale_rollout_begins_when_a_pause_ends(new_world: World) -> None:
    world = new_world(Napping())
    stale = world.start(Say(calls=NAP, step=1), Say("done", step=9), staleness=TWO)
    fresh = world.start(Say(calls=NAP, step=7), Say("done", step=9), staleness=TWO)
    await asyncio.sleep(1)
    world.roster.policies.announce("me", PolicyUpdate(paused=True))
    await asyncio.sleep(60)  # both wait for the end of the pause
    assert world.roster.policies.announce("me", step(9)) == [stale.uid]
    assert reason(await outcome_of(stale)).startswith("stale")
    assert isinstance((await outcome_of(fresh)).end, Stop)
    assert (asked(world, stale), asked(world, fresh)) == (1, 2)


async def test_one_without_tokens_is_not_stale(new_world: World) -> None:
    world = new_world(capacity=Capacity(running=1))
    running = world.start(Say("done", seconds=5, step=8), staleness=TWO)
    queued = world.start(Say("done", step=8), staleness=TWO)
    await asyncio.sleep(1)
    assert world.roster.policies.announce("me", step(9)) == []
    for rollout in (running, queued):
        assert isinstance((await outcome_of(rollout)).end, Stop)


@pytest.mark.parametrize(
    "says", [(Say(calls=NAP, step=6), Say(calls=NAP, step=9), Say("done")), (Say("done", step=1),)]
)
async def test_an_old_completion_cancels_when_it_arrives(new_world: World, says: tuple[Say, ...]) -> None:
    """Also as the last one: the rollout is not judged. In the first case a newer completion makes the first one old."""
    agent = Napping() if len(says) > 1 else Quick()
    world = new_world(agent)
    if len(says) == 1:
        world.roster.policies.announce("me", step(4))
    rollout = world.start(*says, staleness=TWO)
    outcome = await outcome_of(rollout)
    assert reason(outcome).startswith("stale")
    assert asked(world, rollout) == min(2, len(says))
    assert outcome.reward_result.reward is None


@pytest.mark.parametrize(
    "staleness",
    [
        None,
        Staleness(8, StaleAction.CANCEL),
        *(Staleness(0, each) for each in StaleAction if each is not StaleAction.CANCEL),
    ],
)
async def test_others_are_not_cancelled(new_world: World, staleness: Staleness | None) -> None:
    world = new_world(Napping())
    rollout = world.start(Say(calls=NAP, step=1), Say("done", step=2), staleness=staleness)
    unknown = world.start(Say(calls=NAP), Say("done"), staleness=TWO)
    await asyncio.sleep(1)
    assert world.roster.policies.announce("me", step(9)) == []
    for each in (rollout, unknown):
        outcome = await outcome_of(each)
        assert isinstance(outcome.end, Stop)
        assert outcome.policy_step == 9


async def test_one_is_cancelled_during_its_reward_and_never_after_its_end(new_world: World) -> None:
    agent = Napping()
    world = new_world(agent, Cleaning())
    judged = world.start(Say("done", step=1), staleness=TWO)
    cleaning = world.start(Say("done", step=1), staleness=TWO, agent="cleaning")
    await asyncio.sleep(1)
    assert world.roster.policies.announce("me", step(9)) == [judged.uid]
    assert reason(await outcome_of(judged)).startswith("stale")
    outcome = await outcome_of(cleaning)
    assert isinstance(outcome.end, Stop)
    assert (outcome.policy_step, agent.rewarded) == (1, 0)  # the step when the end was decided
    assert world.roster.policies.announce("me", step(10)) == []


async def test_one_that_has_failed_is_not_cancelled_while_its_play_returns(new_world: World) -> None:
    world = new_world(Lingering())
    failed = Failure(Category.TRAINER_SERVER, "the trainer is gone", 2, source=FailureClass.TRAINER)
    rollout = world.start(Say(calls=(call("none"),), step=1), Say(failure=failed), staleness=TWO)
    await asyncio.sleep(1)
    assert rollout.ending.is_reached
    assert world.roster.policies.announce("me", step(9)) == []
    assert not rollout.ending.is_requested
    assert (await outcome_of(rollout)).end == failed


async def test_one_that_waits_for_its_group_is_cancelled() -> None:
    world = GroupHarness(Ranked())
    world.says(_0=Say("a", step=0), _1=Say("bb", step=1, seconds=1), _2=Say("ccc", step=2, seconds=2))
    group = world.start_group(3, staleness=TWO)
    await asyncio.sleep(1.5)  # two have completed, the third one samples
    assert world.roster.policies.announce("me", step(3)) == [group.members[0].uid]
    assert [type((await outcome_of(rollout)).end) for rollout in group.members] == [Cancellation, Stop, Stop]
    rewards = [(await outcome_of(rollout)).reward_result.reward for rollout in group.members]
    assert rewards == [None, 0.0, 1.0]
    await world.close()


async def test_tokens_that_are_masked_out_do_not_count(new_world: World) -> None:
    world = new_world(Masking())
    rollout = world.start(*(Say("so", step=number) for number in (1, 3, 4, 5, 5)), staleness=TWO)
    assert isinstance((await outcome_of(rollout)).end, Stop)


@pytest.mark.parametrize("seed", range(4))
async def test_a_thousand_random_rollouts(new_world: World, seed: int) -> None:
    """250 per seed: none that completes is stale, none is cancelled for less, and no turn of a cancelled one begins."""
    random, world, now = Random(seed), new_world(Napping(), Quick()), 10
    policies, stale = world.roster.policies, set[str]()
    for _ in range(250):
        says = [
            Say(calls=NAP if turn < 3 else (), step=now + turn - random.randint(0, 2), seconds=random.choice((0, 0, 4)))
            for turn in range(random.randint(1, 4))
        ]
        says[-1] = Say("done", step=says[-1].step, seconds=says[-1].seconds)
        staleness = Staleness(random.randint(0, 3), random.choice(list(StaleAction)))
        world.start(*says, staleness=staleness, agent=random.choice(("napping", "quick")))
        if random.random() < 0.4:
            now += random.randint(0, 2)
            uids = policies.announce("me", step(now, paused=random.random() < 0.4))
            assert not stale.intersection(uids)
            stale.update(uids)
        before = {each: asked(world, each) for each in world.rollouts if each.uid in stale}
        await asyncio.sleep(random.choice((0, 1, 3)))
        assert before == {each: asked(world, each) for each in before}
    policies.announce("me", step(now))
    outcomes = {rollout: await outcome_of(rollout) for rollout in world.rollouts}
    for rollout, outcome in outcomes.items():
        staleness, oldest = rollout.spec.staleness, rollout.machine.oldest_policy_step
        assert staleness is not None
        assert oldest is not None
        lag = max(outcome.policy_step or 0, rollout.machine.newest_policy_step or 0) - oldest
        late = staleness.action is StaleAction.CANCEL and lag > staleness.max_lag
        assert isinstance(outcome.end, Cancellation if late else Stop)
        assert late or rollout.uid not in stale
    assert len(stale) > 5
    assert any(isinstance(outcome.end, Stop) for outcome in outcomes.values())
    assert not world.roster.cancel(Selection(ME), "none is left")
