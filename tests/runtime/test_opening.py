"""Samplers that cannot be opened."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rollout_server.core.spec import Spec
from rollout_server.runtime.ports import Sampler, Tool
from rollout_server.runtime.registry.registry import RolloutRegistry
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.start_request import Capacity, StartRequest

from tests.support.runtime_harness import (
    ME,
    Looping,
    Say,
    Script,
    a_spec,
    a_wish,
)


def open_unless_bad(uid: str, spec: Spec, tools: Sequence[Tool]) -> Sampler:
    """Open samplers, except for rollouts named "bad"."""
    if spec.rollout_id == "bad":
        raise OSError("no such tokenizer")
    return Script(Say("done", seconds=10))


def unready_roster() -> RolloutRegistry:
    uids = iter("abcdefgh")
    return RolloutRegistry([Looping()], open_unless_bad, lambda: next(uids), capacity=Capacity(running=1))


async def test_a_rollout_whose_sampler_cannot_be_opened_is_refused_or_ends() -> None:
    roster = unready_roster()
    try:
        roster.start(roster.admission.admit(a_wish("key", rollout_id="bad")))
    except OSError:
        assert [*roster.select(Selection(ME))] == []
    else:
        await asyncio.sleep(1)
        assert [rollout.outcome is not None for _, rollout in roster.select(Selection(ME))] == [True]


async def test_a_sampler_that_cannot_be_opened_does_not_hold_the_queue() -> None:
    roster = unready_roster()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    rollouts = [
        roster.start(roster.admission.admit(StartRequest(a_spec(rollout_id=name), "me")))[0]
        for name in ("first", "bad", "last")
    ]
    await asyncio.sleep(60)
    assert [rollout.outcome is not None for rollout in rollouts] == [True, True, True]
