"""Announced policies: pauses of sampling, their scopes and bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

import pytest
from rollout_server import Agent, Run, tool
from rollout_server.core.error import Busy, InvalidRequest
from rollout_server.core.limits import Limits
from rollout_server.core.outcome import Category, Failure, Stop
from rollout_server.core.spec import Dialect, Target
from rollout_server.runtime.policy import LONGEST_VERSION, PolicyUpdate
from rollout_server.runtime.registry.policies import MOST_ENDPOINTS, AnnouncedPolicies
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.rollout import Rollout

from tests.support.runtime_harness import ME, RuntimeHarness, Say, call, outcome_of

World = Callable[..., RuntimeHarness]
PAUSED, RESUMED = PolicyUpdate(paused=True), PolicyUpdate()
LONG = 10_000.0
"""Seconds, which pass at once: time is virtual here."""


@tool
async def nap() -> str:
    """Sleeps for five seconds."""
    await asyncio.sleep(5)
    return "slept"


class Napping(Agent):
    """The default loop with one tool."""

    name = "napping"
    tools = (nap,)


class Sidekick(Agent):
    """Returns while a task of its own still samples."""

    name = "sidekick"

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[object]] = []

    async def play(self, run: Run) -> None:
        await run.sample()
        helper = await run.fork([{"role": "user", "content": "Help."}])
        self.tasks.append(asyncio.create_task(helper.sample()))
        await asyncio.sleep(10)


def asked(world: RuntimeHarness, rollout: Rollout) -> int:
    """The number of completions that were requested for a rollout."""
    return len(world.script(rollout).asks)


async def test_no_turn_begins_during_a_pause_and_all_go_on_after_it(new_world: World) -> None:
    world = new_world(Napping())
    before = world.start(Say(calls=(call("nap"),)), Say("done"))
    await asyncio.sleep(1)  # its tool runs
    assert world.roster.policies.announce("me", PAUSED) == []
    later = world.start(Say("done"))
    await asyncio.sleep(LONG)
    assert (asked(world, before), asked(world, later)) == (1, 0)
    assert before.machine.turn == 1  # a turn that waits has not begun
    world.roster.policies.announce("me", PAUSED)  # still paused
    await asyncio.sleep(LONG)
    assert (asked(world, before), asked(world, later)) == (1, 0)
    world.roster.policies.announce("me", RESUMED)
    for rollout in (before, later):
        outcome = await outcome_of(rollout)
        assert isinstance(outcome.end, Stop)
        assert outcome.metrics.completion_ms == 0  # the pause is no time of the trainer
    assert (asked(world, before), asked(world, later)) == (2, 1)


async def test_a_pending_completion_is_not_withdrawn(new_world: World) -> None:
    world = new_world(Napping())
    rollout = world.start(Say("done", seconds=5))
    await asyncio.sleep(1)
    world.roster.policies.announce("me", PAUSED)
    assert isinstance((await outcome_of(rollout)).end, Stop)


async def test_cancelling_and_time_limits_work_during_a_pause(new_world: World) -> None:
    world = new_world()
    world.roster.policies.announce("me", PAUSED)
    limited, cancelled = world.start(limits=Limits(seconds=30)), world.start()
    await asyncio.sleep(29)
    assert limited.outcome is None
    await asyncio.sleep(2)
    world.roster.cancel(Selection(ME, uids=(cancelled.uid,)), "enough")
    timed_out = (await outcome_of(limited)).end
    assert isinstance(timed_out, Failure)
    assert timed_out.category is Category.TIMEOUT
    assert (await outcome_of(cancelled)).end.reason == "enough"  # type: ignore[union-attr]
    assert asked(world, limited) == asked(world, cancelled) == 0


async def test_tasks_of_an_agent_that_wait_for_the_end_of_a_pause_do_not_outlive_it(new_world: World) -> None:
    agent = Sidekick()
    world = new_world(agent)
    rollout = world.start(Say("done", seconds=1))
    await asyncio.sleep(0.5)
    world.roster.policies.announce("me", PAUSED)
    assert isinstance((await outcome_of(rollout)).end, Stop)
    await asyncio.sleep(1)
    assert [task.cancelled() for task in agent.tasks] == [True]
    assert asked(world, rollout) == 1


async def test_policies_of_a_caller_a_url_and_streams(new_world: World) -> None:
    world = new_world()
    policies = world.roster.policies
    a, b = (Target(f"grpc://{name}:1", Dialect.GRPC) for name in "ab")
    everything = PolicyUpdate(step=5, paused=True)
    mine, other = world.start(completions=a), world.start(completions=a, caller="other")
    streamed = world.start(completions=Target("", Dialect.STREAM))
    policies.announce("me", everything)
    assert [(each.gate.step, each.gate.is_open) for each in (mine, other, streamed)] == [
        (5, False),
        (None, True),
        (None, True),
    ]
    policies.announce("me", RESUMED, b.url)  # a URL without a step has that of all
    later = world.start(completions=a), world.start(completions=b), world.start(completions=b, caller="other")
    assert [(each.gate.step, each.gate.is_open) for each in later] == [(5, False), (5, True), (None, True)]
    policies.announce("me", PolicyUpdate("v9", 9), a.url)
    assert (mine.gate.step, mine.gate.is_open, later[1].gate.step) == (9, True, 5)
    policies.announce("me", PolicyUpdate(step=7))  # the URL's takes precedence
    assert (mine.gate.step, later[1].gate.step) == (9, 7)
    policies.announce("me", PolicyUpdate(step=7, paused=True), "grpc://nobody:1")
    for each in (mine, other, streamed, *later):
        assert isinstance((await outcome_of(each)).end, Stop)


@pytest.mark.parametrize(
    ("update", "field"),
    [
        (PolicyUpdate("v" * (LONGEST_VERSION + 1)), "policy.version"),
        (PolicyUpdate("a\nb"), "policy.version"),
        (PolicyUpdate("a\x00"), "policy.version"),
        (PolicyUpdate("\x1b[2J"), "policy.version"),
        (PolicyUpdate(step=-1), "policy.step"),
        (PolicyUpdate(step=4), "policy.step"),
        (PolicyUpdate(step=-(2**63), paused=True), "policy.step"),
    ],
)
async def test_an_invalid_update_has_no_effect(new_world: World, update: PolicyUpdate, field: str) -> None:
    world = new_world()
    rollout = world.start(Say("done", seconds=5))
    world.roster.policies.announce("me", PolicyUpdate("v" * LONGEST_VERSION, 5))
    with pytest.raises(InvalidRequest) as caught:
        world.roster.policies.announce("me", update)
    assert [violation.field for violation in caught.value.violations] == [field]
    assert (rollout.gate.step, rollout.gate.is_open) == (5, True)
    world.roster.policies.announce("me", PolicyUpdate("\u00fc 7", 2**63 - 1))
    assert rollout.gate.step == 2**63 - 1


def test_a_caller_has_a_bounded_number_of_endpoints() -> None:
    policies = AnnouncedPolicies()
    for number in range(MOST_ENDPOINTS):
        policies.announce("me", PolicyUpdate(step=1, paused=number != 7), f"grpc://trainer:{number}")
    policies.announce("me", PAUSED)  # all endpoints are none
    policies.announce("other", PAUSED, "grpc://trainer:0")
    policies.announce("me", PolicyUpdate(step=2, paused=True), "grpc://trainer:3")
    policies.announce("me", PAUSED, "grpc://new:1")  # in place of the one that is not paused
    with pytest.raises(InvalidRequest):
        policies.announce("me", PolicyUpdate(step=-1), "grpc://trainer:3")
    with pytest.raises(Busy) as caught:
        policies.announce("me", PAUSED, "grpc://new:2")
    assert caught.value.reason == "TOO_MANY_ENDPOINTS"
    policies.announce("me", PAUSED, "grpc://trainer:8")  # one that it has


async def test_a_step_may_decrease_where_no_rollout_is_unfinished(new_world: World) -> None:
    """As when a training begins again from an older checkpoint."""
    world = new_world()
    policies = world.roster.policies
    a, b = (Target(f"grpc://{name}:1", Dialect.GRPC) for name in "ab")
    rollout = world.start(Say("done", seconds=5), completions=a)
    for url in ("", a.url, b.url):
        policies.announce("me", PolicyUpdate(step=5000), url)
    policies.announce("me", PolicyUpdate(step=100), b.url)
    for url in ("", a.url):
        with pytest.raises(InvalidRequest):
            policies.announce("me", PolicyUpdate(step=100), url)
    await outcome_of(rollout)
    policies.announce("me", PolicyUpdate(step=100), a.url)
    policies.announce("me", PolicyUpdate(step=90))
    later = world.start(Say("done", seconds=5), completions=a), world.start(Say("done", seconds=5))
    assert [each.gate.step for each in later] == [100, 90]
    with pytest.raises(InvalidRequest):
        policies.announce("me", PolicyUpdate(step=80))
    for each in later:
        await outcome_of(each)


async def test_an_endpoint_with_unfinished_rollouts_is_not_forgotten(new_world: World) -> None:
    world = new_world()
    policies = world.roster.policies
    rollout = world.start(Say("done", seconds=5), completions=Target("grpc://trainer:0", Dialect.GRPC))
    for number in range(MOST_ENDPOINTS + 3):
        policies.announce("me", PolicyUpdate(step=5), f"grpc://trainer:{number}")
    with pytest.raises(InvalidRequest):
        policies.announce("me", PolicyUpdate(step=4), "grpc://trainer:0")
    policies.announce("me", PolicyUpdate(step=4), "grpc://trainer:1")  # the oldest without rollouts
    await outcome_of(rollout)


@pytest.mark.parametrize("seed", range(5))
async def test_random_announcements_are_those_of_a_naive_reference(new_world: World, seed: int) -> None:
    """200 rollouts of three callers at four endpoints, started between announcements; in the end each has completed."""
    random, world = Random(seed), new_world()
    callers, urls = ("me", "you", "they"), [f"grpc://trainer:{port}" for port in range(4)]
    paused, steps = dict[tuple[str, str], bool](), dict[tuple[str, str], int]()
    rollouts: list[Rollout] = []
    for _ in range(200):
        caller, url = random.choice(callers), random.choice(urls)
        rollouts.append(world.start(completions=Target(url, Dialect.GRPC), caller=caller))
        caller, url = random.choice(callers), random.choice(["", *urls])
        step = None if random.random() < 0.3 else steps.get((caller, url), 0) + random.randint(0, 3)
        paused[caller, url] = random.random() < 0.7
        if step is not None:
            steps[caller, url] = step
        world.roster.policies.announce(caller, PolicyUpdate(step=step, paused=paused[caller, url]), url)
        await asyncio.sleep(random.choice((0, 1)))
        for each in rollouts:
            own, for_all = (each.caller, each.spec.completions.url), (each.caller, "")
            if each.outcome is None:
                assert each.gate.is_open is not paused.get(own, paused.get(for_all, False))
                assert (each.gate.step or 0) >= steps.get(own, 0)  # it never decreases
    for caller, url in paused:
        world.roster.policies.announce(caller, RESUMED, url)
    for each in rollouts:
        assert isinstance((await outcome_of(each)).end, Stop)
        assert asked(world, each) == 1
