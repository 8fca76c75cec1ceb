"""`kill -9` at chosen moments and at random ones: every accepted rollout ends in exactly one outcome.

20 crashes by default; the variable CRASHES sets another number. Each family runs on one journal, which survives all of its crashes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from random import Random

import pytest

from tests.durability.aims import Aim, Moment
from tests.durability.stage import Stage
from tests.durability.trials import DELIVERED, KINDS, Trial

CRASHES = int(os.environ.get("CRASHES", "20"))
AGENTS = ("steps", "replayable", "unrepeatable")
LOAD = 200
Choose = Callable[[Random, int, Sequence[Trial]], Aim]


def a_trial(random: Random, trials: Sequence[Trial], kinds: Sequence[str]) -> Trial:
    return random.choice([each for each in trials if each.kind in kinds])


def in_a_turn(random: Random, number: int, trials: Sequence[Trial]) -> Aim:
    """The trainer has the request; or it has answered, and the server may or may not have recorded that."""
    chosen = a_trial(random, trials, [KINDS[number % len(KINDS)]])
    turn = random.randint(1, len(chosen.case.steps) + 1)
    if number % 2:
        return Aim(Moment.ANSWERED, chosen.case.number, turn, delay=random.choice([0.001, 0.003, 0.01, 0.02]))
    return Aim(Moment.ASKED, chosen.case.number, turn)


def in_a_tool(random: Random, number: int, trials: Sequence[Trial]) -> Aim:
    """A tool kills its server before, between or after its side effects."""
    moment = (Moment.TOOL_BEFORE, Moment.TOOL_MIDDLE, Moment.TOOL_AFTER)[number % 3]
    tool = ("note", "look")[number // 3 % 2]
    with_tool = [each for each in trials if any(tool in step for step in each.case.steps)]
    return Aim(moment, random.choice(with_tool).case.number, tool=tool)


def at_the_outcome(random: Random, number: int, trials: Sequence[Trial]) -> Aim:
    """The receiver has the outcome and has not acknowledged it; or it has just acknowledged it."""
    chosen = a_trial(random, trials, sorted(DELIVERED - {"plain"}))
    if number % 2:
        return Aim(Moment.ACKNOWLEDGED, chosen.case.number, delay=random.choice([0.001, 0.003, 0.01]))
    return Aim(Moment.DELIVERED, chosen.case.number)


def at_a_start(random: Random, number: int, trials: Sequence[Trial]) -> Aim:
    """The client has the OK of StartRollout or the 202 of POST /v1/rollout/init."""
    kinds = ("plain",) if number % 2 else ("grpc", "replaying", "engine")
    return Aim(Moment.STARTED, a_trial(random, trials, kinds).case.number)


def at_any_time(random: Random, number: int, trials: Sequence[Trial]) -> Aim:
    """While 200 rollouts start, run and end."""
    return Aim(Moment.TIME, 0, delay=random.uniform(0.05, 1.5))


FAMILIES: Mapping[str, tuple[Choose, int]] = {
    "turns": (in_a_turn, 6),
    "tools": (in_a_tool, 6),
    "outcomes": (at_the_outcome, 4),
    "starts": (at_a_start, 2),
    "load": (at_any_time, 2),
}
"""How the aims of a family are chosen, and its share of 20 crashes."""


@pytest.mark.timeout(60 + 6 * CRASHES)
@pytest.mark.parametrize("family", FAMILIES)
async def test_every_accepted_rollout_ends_once(here: Stage, family: str) -> None:
    choose, share = FAMILIES[family]
    for number in range(max(1, share * CRASHES // 20)):
        random = Random(f"{family} {number}")
        trials = here.trials(each=LOAD // len(KINDS)) if family == "load" else here.trials(agents=AGENTS)
        await here.crash_and_check(choose(random, number, trials), trials)
    if family == "turns":
        counts = [count for keys in here.trainers.keys_by_rollout().values() for count in keys.values()]
        assert max(counts) > 1  # completions in flight were requested again
    here.server.kill()
    await here.server.restart()
    await here.prepare(here.trials(number=1_000))  # what the restart still sends is sent before these have ended
    here.check_nothing_after_acknowledgement()
