"""Lists among many rollouts: what is found quickly is what a test of every rollout finds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from itertools import product
from typing import Any

import pytest
from rollout_server import Run
from rollout_server.core.error import Busy
from rollout_server.core.outcome import Category, Failure, FailureClass, failure_class_of
from rollout_server.runtime.registry import pages, rollout_sets
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.rollout import Rollout, RolloutState
from rollout_server.runtime.start_request import Caller, Capacity

from tests.runtime.test_roster import BLOCKED, Other
from tests.support.runtime_harness import ME, OTHER, Looping, RuntimeHarness, Say

ADMIN = Caller("admin", admin=True)
TRAINER = FailureClass.TRAINER
FAILED = Failure(Category.TRAINER_CLIENT, "no", source=TRAINER)


def by_hand(rollouts: Sequence[Rollout], chosen: Selection) -> list[Rollout]:
    """Test each rollout."""
    ends = [None if each.outcome is None else failure_class_of(each.outcome.end) for each in rollouts]
    return [
        each
        for each, end in list(zip(rollouts, ends, strict=True))[::-1]
        if (chosen.caller.admin or each.caller == chosen.caller.name)
        and (not chosen.callers or each.caller in chosen.callers)
        and chosen.agent in ("", each.spec.agent)
        and chosen.group_id in ("", each.spec.group_id)
        and (not chosen.states or each.state in chosen.states)
        and (not chosen.failure_classes or end in chosen.failure_classes)
        and (not chosen.text or chosen.text.lower() in each.spec.rollout_id)
    ]


async def listed(world: RuntimeHarness, selection: Selection, size: int) -> list[Rollout]:
    """The rollouts of all pages."""
    found, before = list[Rollout](), None
    while True:
        page = await world.roster.pages.page(selection, before, size)
        assert len(page.rollouts) <= size
        found += [rollout for _, rollout in page.rollouts]
        if page.next_before is None:
            return found
        before = page.next_before


@pytest.mark.parametrize("unsorted", [0, 5, 4096])
async def test_every_selection_finds_what_a_test_of_each_rollout_finds(
    new_world: type[RuntimeHarness], monkeypatch: pytest.MonkeyPatch, unsorted: int
) -> None:
    monkeypatch.setattr(rollout_sets, "MOST_UNSORTED", unsorted)
    monkeypatch.setattr(pages, "_CHUNK", 3)
    choose = random.Random(7)
    world = new_world(Looping(), Other(), capacity=Capacity(running=5, finished=30))
    for number in range(80):
        says = choose.choice([Say(seconds=choose.random() * 50), Say(failure=FAILED, seconds=choose.random()), BLOCKED])
        fields: dict[str, Any] = {
            "agent": choose.choice(["looping", "other"]),
            "group_id": choose.choice(["", "g", "h"]),
        }
        world.start(says, rollout_id=f"name {number}", caller=choose.choice(["me", "you"]), **fields)
        await asyncio.sleep(choose.random())
        if number % 3 == 0:
            cancelled = Selection(ADMIN, uids=(choose.choice(world.rollouts).uid,))
            world.roster.cancel(cancelled, "no")
    world.roster.forget()
    there = [rollout for _, rollout in world.roster.select(Selection(ADMIN))][::-1]
    states = (), (RolloutState.FINISHED,), (RolloutState.RUNNING, RolloutState.QUEUED), (RolloutState.QUEUED,)
    classes = (), (TRAINER,), (FailureClass.CANCELLED,), (FailureClass.CANCELLED, TRAINER), (FailureClass.TOOL,)
    axes = ((ME, ADMIN), ((), ("me",)), ("", "other", "x"), ("", "g", "x"), states, classes, ("", "NAME 1"))
    lengths = set()
    for caller, callers, agent, group, state, failure, text in product(*axes):
        selection = Selection(caller, (), (), group, agent, state, {}, (), callers, failure, text)
        expected = by_hand(there, selection)
        lengths.add(len(expected))
        assert await listed(world, selection, 4) == expected
    assert len(lengths) > 10


async def test_what_is_forgotten_is_in_no_set(new_world: type[RuntimeHarness]) -> None:
    world = new_world(capacity=Capacity(finished=0))
    for says in (Say(), Say(failure=FAILED)):
        world.start(says, group_id="g")
    await asyncio.sleep(1)
    world.roster.forget()
    assert world.roster._index._sets._sets == {}


async def test_many_scans_take_turns_and_too_many_are_refused(
    new_world: type[RuntimeHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "SLICE", -1.0)
    world = new_world()
    for _ in range(50):
        world.start(BLOCKED)
    scans = [world.roster.pages.page(Selection(ME, text="x"), None, 9) for _ in range(pages.MOST_SCANS + 3)]
    other = asyncio.create_task(world.roster.pages.page(Selection(OTHER, text="x"), None, 9))
    found = await asyncio.gather(*scans, return_exceptions=True)
    assert (await other).rollouts == []
    assert sum(isinstance(each, Busy) for each in found) == 3
    assert sum(isinstance(each, pages.RolloutPage) for each in found) == pages.MOST_SCANS
    tasks = [asyncio.create_task(world.roster.pages.page(Selection(ME, text="x"), None, 9)) for _ in range(9)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (await world.roster.pages.page(Selection(ME, text="x"), None, 9)).rollouts == []
    assert world.roster.pages._scans == {}


class Stubborn(Looping):
    """An agent that ignores its cancellation until it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.free = asyncio.Event()

    async def play(self, run: Run) -> None:
        while not self.free.is_set():
            with suppress(asyncio.CancelledError):
                await self.free.wait()


async def test_a_rollout_whose_agent_still_runs_is_listed_and_counted_once_as_finished(
    new_world: type[RuntimeHarness],
) -> None:
    agent = Stubborn()
    world = new_world(agent)
    rollout = world.start()
    await asyncio.sleep(1)
    world.roster.cancel(Selection(ME, uids=(rollout.uid,)), "no")
    [_] = [each async for each in rollout.log.follow(rollout.log.last_sequence)]
    assert rollout.running
    for _ in range(2):
        for states, classes in product(((), (RolloutState.FINISHED,)), ((), (FailureClass.CANCELLED,))):
            assert await listed(world, Selection(ADMIN, states=states, failure_classes=classes), 4) == [rollout]
        unfinished = (RolloutState.RUNNING, RolloutState.QUEUED)
        assert await listed(world, Selection(ADMIN, states=unfinished), 4) == []
        assert (world.roster.totals.finished, world.roster.totals.failed) == (1, 1)
        agent.free.set()
        await asyncio.sleep(20)
    assert not rollout.running
