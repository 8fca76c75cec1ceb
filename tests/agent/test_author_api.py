"""The rest of the author API: synchronous functions, time, randomness, side effects, state, masks, tools by request."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from random import Random
from typing import Any

import pytest
from rollout_server import Agent, Limits, Request, RewardResult, Run, tool
from rollout_server.core.error import NotPossible, RolloutError
from rollout_server.core.ledger import MaskReason
from rollout_server.core.outcome import Cancellation, Failure, Stop
from rollout_server.core.record import Masked, Observed
from rollout_server.core.spec import Dialect, Target, TokenizerName
from rollout_server.runtime.errors import AgentMistake
from rollout_server.runtime.ports import Tool
from rollout_server.runtime.rollout import Rollout

from tests.support.runtime_harness import EPOCH, FOREVER, RuntimeHarness, Say, a_spec, assert_internal, call, outcome_of


@tool
async def left() -> str:
    """Goes left."""
    return "wall"


@tool
async def right() -> str:
    """Goes right."""
    return "door"


def observed(rollout: Rollout) -> list[tuple[str, object]]:
    records = [entry.record for entry in rollout.log.entries]
    return [(each.what, json.loads(each.value_json)) for each in records if isinstance(each, Observed)]


async def test_time_chance_and_effects_are_recorded(new_world: type[RuntimeHarness]) -> None:
    told: list[object] = []
    calls: list[str] = []

    async def fetch() -> dict[str, int]:
        calls.append("async")
        return {"a": 1}

    def load() -> tuple[int, str]:
        calls.append(threading.current_thread().name)
        return (1, "ü")

    class Observing(Agent):
        name = "observing"

        async def play(self, run: Run) -> None:
            told.extend((run.now(), run.random() is run.random(), run.random().random()))
            told.extend((await run.once(fetch), await run.once(load)))
            other = await run.fork([{"role": "user", "content": "x"}])
            told.append(other.random() is not run.random())
            await run.sample()

    rollout = new_world(Observing()).start()
    assert (await outcome_of(rollout)).end == Stop("stop")
    (what, seed) = observed(rollout)[1]
    assert what == "random"
    assert isinstance(seed, int)
    time_, same, drawn, fetched, loaded, own = told
    assert time_ == datetime.fromtimestamp(EPOCH, UTC) or isinstance(time_, datetime)
    assert (same, drawn, fetched, loaded, own) == (True, Random(seed).random(), {"a": 1}, [1, "ü"], True)
    assert [kind for kind, _ in observed(rollout)] == ["now", "random", "once", "once", "random"]
    assert observed(rollout)[2:4] == [("once", {"a": 1}), ("once", [1, "ü"])]
    assert calls[0] == "async"
    assert calls[1] != threading.main_thread().name


async def test_what_json_cannot_hold_is_named_by_its_line(
    new_world: type[RuntimeHarness], caplog: pytest.LogCaptureFixture
) -> None:
    class Unwritable(Agent):
        name = "unwritable"

        async def play(self, run: Run) -> None:
            await run.once(lambda: {1, 2})  # type: ignore[type-var]

    rollout = new_world(Unwritable()).start()
    assert_internal(await outcome_of(rollout))
    assert "once: the function's result cannot be serialized as JSON" in caplog.text
    assert "test_author_api.py:" in caplog.text
    assert observed(rollout) == []


async def test_state_is_the_rollouts_own(new_world: type[RuntimeHarness]) -> None:
    class Keeping(Agent):
        name = "keeping"

        async def play(self, run: Run) -> None:
            assert run.state == {}
            run.state["seen"] = run.rollout_id
            fork = await run.fork([{"role": "user", "content": "x"}])
            fork.state["forked"] = 1
            await run.sample()

        async def reward(self, run: Run) -> RewardResult:
            return RewardResult(float(run.state["forked"]), {"length": float(len(run.state["seen"]))})

    world = new_world(Keeping())
    outcomes = [await outcome_of(world.start()) for _ in range(2)]
    assert [outcome.reward_result for outcome in outcomes] == [RewardResult(1.0, {"length": 2.0})] * 2


async def test_an_author_masks_answers_out(new_world: type[RuntimeHarness]) -> None:
    mistakes: list[str] = []

    class Masking(Agent):
        name = "masking"

        async def play(self, run: Run) -> None:
            self.first = await run.sample()
            await run.append({"role": "user", "content": "Again."})
            second = await run.sample()
            run.mask(self.first, "dull")
            for reply, reason in ((second, " "), (second.__class__({}, (), "", 3), "no such turn")):
                try:
                    run.mask(reply, reason)
                except AgentMistake as mistake:
                    mistakes.append(str(mistake))

        async def reward(self, run: Run) -> None:
            run.mask(self.first, "still dull")

    rollout = new_world(Masking()).start(Say("8", tokens=2), Say("9", tokens=3))
    outcome = await outcome_of(rollout)
    assert outcome.end == Stop("stop")
    (segment,) = outcome.segments
    assert [span.reason for span in segment.spans] == [
        MaskReason.PROMPT,
        MaskReason.AUTHOR,
        MaskReason.ENVIRONMENT,
        None,
    ]
    assert segment.sample().response_mask == b"\x00\x00\x00\x01\x01\x01"
    masked = [entry.record for entry in rollout.log.entries if isinstance(entry.record, Masked)]
    assert masked == [Masked(1, "dull"), Masked(1, "still dull")]
    assert mistakes == [
        "mask: the reason is ' '; it must be a non-blank text of 1 to 1000 characters",
        "mask: the rollout has no completion of turn 3",
    ]


class Plain(Agent):
    """`play` and `reward` run in threads."""

    name = "plain"
    tools = (left,)

    def play(self, run: Run) -> None:
        run.state["thread"] = threading.current_thread()
        while calls := run.wait(run.sample()).tool_calls:
            run.wait(run.call(calls))
            run.note("called", run.now().isoformat())

    def reward(self, run: Run) -> float:
        assert threading.current_thread() is not threading.main_thread()
        assert run.state["thread"] is not threading.main_thread()
        return float(len(run.messages))


async def test_plain_functions_run_in_threads(new_world: type[RuntimeHarness]) -> None:
    rollout = new_world(Plain()).start(Say("", (call("left"),)), Say("done"))
    outcome = await outcome_of(rollout)
    assert (outcome.end, outcome.reward_result) == (Stop("stop"), RewardResult(4.0))
    assert [kind for kind, _ in observed(rollout)] == ["now"]


async def test_a_limit_ends_a_plain_play(new_world: type[RuntimeHarness]) -> None:
    outcome = await outcome_of(new_world(Plain()).start(Say("", (call("left"),)), limits=Limits(turns=2)))
    assert (outcome.end, outcome.metrics.turns) == (Stop("max_turns"), 2)


async def test_a_thread_is_left_alone_and_sees_that_it_is(new_world: type[RuntimeHarness]) -> None:
    saw = threading.Event()

    class Stubborn(Agent):
        name = "stubborn"

        def play(self, run: Run) -> None:
            with suppress(Exception):
                run.wait(run.sample())
            raise AssertionError("the end goes past except Exception")

        async def reward(self, run: Run) -> None: ...

    class Computing(Agent):
        name = "computing"

        def play(self, run: Run) -> None:
            while not run.cancelled:
                time.sleep(0.001)
            saw.set()

    world = new_world(Computing(), Stubborn())
    waits = world.start(Say(seconds=FOREVER), agent="stubborn")
    computes = world.start()
    await asyncio.sleep(0.1)
    for rollout in (waits, computes):
        rollout.ending.request(Cancellation("enough"))
    assert [(await outcome_of(rollout)).end for rollout in (waits, computes)] == [Cancellation("enough")] * 2
    assert await asyncio.to_thread(saw.wait, 10)


async def test_waiting_is_for_threads(new_world: type[RuntimeHarness], caplog: pytest.LogCaptureFixture) -> None:
    class Confused(Agent):
        name = "confused"

        async def play(self, run: Run) -> None:
            run.wait(run.sample())

    assert_internal(await outcome_of(new_world(Confused()).start()))
    assert "run.wait is for plain functions" in caplog.text
    assert "agent confused: play() failed at " in caplog.text
    assert "test_author_api.py:" in caplog.text


class Choosing(Agent):
    """Behave as the request's metadata says."""

    name = "choosing"
    tools = (left, right)

    def choose_tools(self, request: Request) -> Sequence[Tool]:
        where = request.metadata["where"]
        assert [message["role"] for message in request.messages] == ["user"]
        return [each for each in (left, right) if each.name == where] if where != "nowhere" else [7]  # type: ignore[list-item]


def at(where: str, **fields: object) -> dict[str, Any]:
    return {"metadata_json": json.dumps({"where": where}), **fields}


async def test_tools_are_chosen_by_request(new_world: type[RuntimeHarness]) -> None:
    world = new_world(Choosing())
    rollout = world.start(Say("", (call("right", "a"), call("left", "b"))), Say("done"), **at("right"))
    outcome = await outcome_of(rollout)
    assert [each.name for each in rollout.tools] == ["right"]
    results = [message.fields()["content"] for message in outcome.messages if message.role == "tool"]
    assert results == ["door", "Error: Unknown function 'left'. Available: ['right']"]


async def test_a_choice_that_fails_refuses_the_request_and_takes_no_place(
    new_world: type[RuntimeHarness], caplog: pytest.LogCaptureFixture
) -> None:
    world = new_world(Choosing())
    for fields in (at("nowhere"), {}):
        with pytest.raises(RolloutError) as refused:
            world.start(**fields)
        assert (refused.value.reason, refused.value.message.startswith("agent 'choosing' could not")) == (
            "AGENT_FAILED",
            True,
        )
    assert "7 is neither a tool nor a function" in caplog.text
    assert "could not choose its tools at " in caplog.text
    masked = Target("http://trainer:1", Dialect.HTTP_MASKED)
    with pytest.raises(NotPossible, match="cannot send that choice"):
        world.start(spec=a_spec(rollout_id="m", completions=masked, tokenizer=TokenizerName("t"), **at("left")))
    assert (world.roster.running, world.roster.queued) == (0, 0)


async def test_a_failure_in_one_rollout_harms_no_other(new_world: type[RuntimeHarness]) -> None:
    class Failing(Agent):
        name = "failing"

        def play(self, run: Run) -> None:
            if run.metadata:
                raise LookupError("no")
            run.wait(run.sample())

    world = new_world(Failing())
    wrong, right_ = world.start(metadata_json='{"a": 1}'), world.start()
    assert isinstance((await outcome_of(wrong)).end, Failure)
    assert (await outcome_of(right_)).end == Stop("stop")
