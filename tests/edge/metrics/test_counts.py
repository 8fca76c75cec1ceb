"""Counters of rollouts, and that they add up."""

from __future__ import annotations

import asyncio
import random

import pytest
from rollout_server import Agent, Run, tool
from rollout_server.calculator import Calculator
from rollout_server.core.ledger import Prediction, pack_tokens
from rollout_server.core.limits import Limits
from rollout_server.core.outcome import Category, Failure
from rollout_server.core.record import Answered
from rollout_server.edge.metrics.observer import MetricsObserver
from rollout_server.runtime.ports import CompletionRequest
from rollout_server.runtime.registry.dependencies import Attempt, Observer
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.start_request import Caller, Capacity

from tests.edge.metrics.counted import ADD, Counted, call, calling, done, failing, ledger_tokens, outcome_of, read, said


class Wordy(Agent):
    """Finish with the reason in the request."""

    name = "wordy"

    async def play(self, run: Run) -> None:
        """Request one completion."""
        await run.sample()
        await run.finish(str(run.metadata["word"]))


@tool
async def nap(seconds: float) -> str:
    """Sleeps."""
    await asyncio.sleep(seconds)
    return "rested"


class Sleepy(Agent):
    """Has a slow tool."""

    name = "sleepy"
    tools = (nap,)


def test_metrics_observe() -> None:
    observer: Observer = MetricsObserver()
    assert observer.recorded.__doc__


async def test_a_rollout_is_counted_from_its_beginning_to_its_end() -> None:
    world = Counted(Calculator(), Wordy())
    outcome = await world.play(
        calling([ADD], [call("add", "{"), call("launch_missiles")], elapsed_ms=1500.0, attempts=2)
    )
    exposed, agent = world.exposed(), {"agent": "calculator"}
    assert exposed.value("rollout_accepted_total", **agent) == 1
    assert exposed.by("rollout_finished_total", "agent", "end", "reason") == {("calculator", "stop", "stop"): 1}
    assert exposed.value("rollout_turns_total", **agent) == outcome.metrics.turns == 3
    assert exposed.value("rollout_completion_seconds_count", **agent) == 3
    assert exposed.value("rollout_completion_seconds_sum", **agent) == 4.5
    assert exposed.value("rollout_completion_seconds_bucket", **agent, le="1.0") == 0
    assert exposed.value("rollout_completion_seconds_bucket", **agent, le="2.5") == 3
    assert exposed.value("rollout_completion_retries_total") == 3
    assert exposed.by("rollout_tool_seconds_count", "tool", "failed") == {
        ("add", "false"): 1,
        ("add", "true"): 1,
        ("unknown", "true"): 1,
    }
    assert exposed.by("rollout_segments_total", "kind") == {("main",): 1}
    assert exposed.by("rollout_tokens_total", "author", "reason") == ledger_tokens([outcome])
    assert exposed.value("rollout_duration_seconds_count", **agent, end="stop") == 1
    assert exposed.value("rollout_queue_seconds_count", **agent) == 1
    assert exposed.total("rollout_accepted_total", agent="wordy") == 0


async def test_every_end_is_counted_once_and_in_words_of_ours() -> None:
    world = Counted(Calculator(), Wordy())
    await world.play(done)
    await world.play(calling([ADD], [ADD]), limits=Limits(turns=1))
    await world.play(calling([ADD]), limits=Limits(generated_tokens=1))
    await world.play(done, agent="wordy", metadata_json='{"word": "max_bytes"}')
    await world.play(done, agent="wordy", metadata_json='{"word": "my own word"}')
    for category in Category:
        await world.play(failing(Failure(category, "it went wrong")))
    for reason in ("the user's own words", "stale: policy version 3"):
        rollout = world.start(calling([ADD]))
        world.roster.cancel(Selection(Caller("me"), uids=(rollout.uid,)), reason)
        await outcome_of(rollout)
    await outcome_of(world.start(calling([ADD]), cancel_after_detach=0.0))
    exposed = world.exposed()
    expected = {("failure", category.value): 1.0 for category in Category} | {
        ("stop", "stop"): 1,
        ("stop", "max_turns"): 1,
        ("stop", "max_tokens"): 1,
        ("stop", "max_bytes"): 1,
        ("stop", "other"): 1,
        ("cancellation", "other"): 1,
        ("cancellation", "stale"): 1,
        ("cancellation", "detached"): 1,
    }
    assert exposed.by("rollout_finished_total", "end", "reason") == expected
    assert exposed.total("rollout_finished_total") == exposed.total("rollout_accepted_total") == len(world.rollouts)
    assert exposed.total("rollout_duration_seconds_count") == len(world.rollouts)
    assert exposed.total("rollout_queue_seconds_count") == len(world.rollouts)
    assert exposed.total("rollout_turns_total") == sum(r.machine.metrics.turns for r in world.rollouts)


async def test_times_are_in_seconds() -> None:
    world = Counted(Sleepy(), capacity=Capacity(running=1))
    first = world.start(calling([call("nap", '{"seconds": 40.0}')]))
    second = world.start(done)
    await outcome_of(first)
    await outcome_of(second)
    exposed = world.exposed()
    assert exposed.value("rollout_tool_seconds_sum", tool="nap", failed="false") == 40
    assert exposed.value("rollout_duration_seconds_sum", agent="sleepy", end="stop") == 40
    assert exposed.value("rollout_duration_seconds_bucket", agent="sleepy", end="stop", le="30.0") == 1
    assert exposed.value("rollout_duration_seconds_bucket", agent="sleepy", end="stop", le="60.0") == 2
    assert exposed.value("rollout_queue_seconds_sum", agent="sleepy") == 40


async def test_the_roster_is_shown_as_it_is() -> None:
    world = Counted(Sleepy(), capacity=Capacity(running=2))
    rollouts = [world.start(calling([call("nap", '{"seconds": 1.0}')])) for _ in range(5)]

    def shown() -> tuple[float, float]:
        exposed = world.exposed()
        return exposed.value("rollout_running"), exposed.value("rollout_queued")

    assert shown() == (2, 3)
    for rollout in rollouts:
        await outcome_of(rollout)
    await world.roster.drain(0)
    assert shown() == (0, 0)


async def test_any_number_can_be_shown() -> None:
    metrics, pending = MetricsObserver(), [1, 2]
    metrics.watch("deliveries_pending", "Outcomes that nobody has acknowledged.", lambda: len(pending))
    assert read(metrics).value("rollout_deliveries_pending") == 2
    pending.clear()
    assert read(metrics).value("rollout_deliveries_pending") == 0


async def test_deliveries_are_counted_by_what_they_came_to() -> None:
    world = Counted(Calculator())
    rollout = world.start(done)
    await outcome_of(rollout)
    for attempt, milliseconds in ((Attempt.FAILED, 50.0), (Attempt.FAILED, 30_000.0), (Attempt.ACKNOWLEDGED, 5.0)):
        world.metrics.delivered(rollout, attempt, milliseconds)
    exposed = world.exposed()
    assert exposed.by("rollout_delivery_attempt_seconds_count", "result") == {("failed",): 2, ("acknowledged",): 1}
    assert exposed.value("rollout_delivery_attempt_seconds_sum", result="failed") == 30.05
    assert exposed.value("rollout_delivery_attempt_seconds_count", result="refused") == 0


async def test_warnings_and_drift_are_those_of_the_outcomes() -> None:
    world = Counted(Calculator())
    notes = (("resampled", "twice"), ("unverified", "x"), ("a word of somebody's", "y"))

    def drifting(ask: CompletionRequest) -> Answered:
        reported = [1] if ask.asked.turn == 1 else [9, 9, 9]
        return said(ask, *([ADD] if ask.asked.turn == 1 else []), reported=pack_tokens(reported), notes=notes)

    outcome = await world.play(drifting)
    exposed = world.exposed()
    assert exposed.by("rollout_warnings_total", "code") == {
        ("resampled",): 2,
        ("unverified",): 2,
        ("other",): 2,
        ("token_drift",): 1,
    }
    assert exposed.total("rollout_warnings_total") == len(outcome.warnings)
    assert exposed.by("rollout_drift_total", "kind") == {("history_rewritten",): 1}
    assert exposed.by("rollout_segments_total", "kind") == {("main",): 1, ("drift",): 1}
    assert exposed.by("rollout_tokens_total", "author", "reason") == ledger_tokens([outcome])


async def test_a_retry_that_may_have_made_a_sibling_is_counted_when_it_happens() -> None:
    world = Counted(Calculator())

    def resampling(ask: CompletionRequest) -> Answered:
        ask.note("resampled", "the second time")
        ask.note("somebody's word", "no")
        return said(ask)

    await world.play(resampling)
    assert world.exposed().value("rollout_resampled_total") == 1


class Chance:
    """A trainer that does everything a trainer may do with ids: none, empty, extending, drifting, leaving gaps."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.rollout: Rollout

    def __call__(self, ask: CompletionRequest) -> Answered:
        dice = self._random
        answer = None if dice.random() < 0.15 else pack_tokens(self._some(dice.choice((0, 0, 1, 5))))
        held = self.rollout.machine.ledger.main.segment
        own = list(held.ids()) if held is not None else []
        reported = dice.choice(
            (None, None, [*own, *self._some(3)], own, own[: len(own) // 2], [*own[1:], 5], self._some(4))
        )
        predicted = None if dice.random() < 0.2 else Prediction(pack_tokens(self._some(1)), pack_tokens(self._some(3)))
        return said(
            ask,
            *([ADD] if dice.random() < 0.85 else []),
            token_ids=answer,
            reported=None if reported is None else pack_tokens(reported),
            predicted=predicted,
        )

    def _some(self, most: int) -> list[int]:
        return [self._random.randrange(4) for _ in range(self._random.randrange(most + 1))]


@pytest.mark.parametrize("seed", range(4))
async def test_tokens_turns_segments_and_drift_add_up_to_the_ledgers(seed: int) -> None:
    """Whatever trainers send, the counters equal the sums over all ledgers, for running and finished rollouts."""
    world = Counted(Calculator())
    for number in range(60):
        trainer = Chance(1000 * seed + number)
        trainer.rollout = world.start(trainer, limits=Limits(turns=12))
        await outcome_of(trainer.rollout)
    outcomes = [rollout.outcome for rollout in world.rollouts if rollout.outcome is not None]
    exposed = world.exposed()
    assert len(outcomes) == 60
    assert exposed.by("rollout_tokens_total", "author", "reason") == ledger_tokens(outcomes)
    assert exposed.total("rollout_turns_total") == sum(o.metrics.turns for o in outcomes) > 200
    assert exposed.total("rollout_completion_seconds_count") == exposed.total("rollout_turns_total")
    assert exposed.total("rollout_tool_seconds_count") == sum(o.metrics.tool_calls for o in outcomes)
    assert exposed.total("rollout_segments_total") == sum(len(o.segments) for o in outcomes)
    drifts = sum(warned.code == "token_drift" for o in outcomes for warned in o.warnings)
    assert exposed.total("rollout_drift_total") == exposed.value("rollout_warnings_total", code="token_drift") == drifts
    assert len(exposed.by("rollout_segments_total", "kind")) == 3
