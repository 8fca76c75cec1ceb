"""`setup` and `cleanup` of a rollout: whatever the end, the cleanup runs once, after everything else, and changes no end."""

from __future__ import annotations

import asyncio
import sys
import threading
from contextlib import suppress
from typing import Any

import pytest
from rollout_server import Agent, Limits, Run, tool
from rollout_server.core.outcome import Cancellation, Category, Failure, Stop
from rollout_server.runtime.errors import RolloutEnded
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.rollout import Rollout, RolloutState
from rollout_server.runtime.start_request import Capacity

from tests.runtime.outcome_receivers import Receiver, owing
from tests.support.runtime_harness import (
    FOREVER,
    ME,
    SECRET,
    Looping,
    RuntimeHarness,
    Say,
    assert_internal,
    call,
    check_log,
    contents,
    outcome_of,
    wait,
)

ALL = Selection(ME)
FAILED = "The agent's cleanup failed; the server's log has the reason under rollout u1"


@tool
async def stall() -> str:
    """Never returns."""
    await wait(FOREVER)
    return ""


class Sandboxed(Agent):
    """Keep a list in `run.state`, and fail or wait in the method that the request's metadata names."""

    name = "sandboxed"
    tools = (stall,)

    def __init__(self) -> None:
        self.told: dict[str, list[str]] = {}

    async def reach(self, run: Run, part: str) -> None:
        run.state.setdefault("told", self.told.setdefault(run.uid, [])).append(part)
        match run.metadata.get(part):
            case "raises":
                raise LookupError(SECRET)
            case "waits":
                await wait(FOREVER)

    async def setup(self, run: Run) -> None:
        await self.reach(run, "setup")

    async def play(self, run: Run) -> None:
        try:
            await self.reach(run, "play")
            await super().play(run)
        finally:
            await asyncio.sleep(1)
            run.state["told"].append("play ended")

    async def reward(self, run: Run) -> float:
        await self.reach(run, "reward")
        return 0.5

    async def cleanup(self, run: Run) -> None:
        await self.reach(run, "cleanup")


BEGUN = ["setup", "play", "play ended"]
WHOLE = [*BEGUN, "reward"]
CALLS = Say("", (call("stall"),))
ENDINGS = [
    pytest.param("", "", [Say("8")], WHOLE, "stop", id="success"),
    pytest.param("", "", [Say("", (call("nothing"),))], WHOLE, "max_turns", id="a limit"),
    pytest.param("setup", "raises", [Say("8")], ["setup"], Category.INTERNAL, id="setup raises"),
    pytest.param("play", "raises", [Say("8")], BEGUN, Category.INTERNAL, id="play raises"),
    pytest.param("reward", "raises", [Say("8")], WHOLE, Category.INTERNAL, id="reward raises"),
    pytest.param("", "", [Say(failure=Failure(Category.NETWORK, "nobody"))], BEGUN, Category.NETWORK, id="trainer"),
    *(
        pytest.param(where, how, says, told, end, id=f"{end} in {where or 'a tool'}")
        for end in ("cancel", "time", "drain")
        for where, how, says, told in (
            ("setup", "waits", [Say("8")], ["setup"]),
            ("play", "waits", [Say("8")], BEGUN),
            ("", "", [CALLS], BEGUN),
            ("reward", "waits", [Say("8")], WHOLE),
        )
    ),
]
REQUESTED = {"time": Category.TIMEOUT, "drain": Category.INTERRUPTED}


def start(world: RuntimeHarness, *says: Say, **parts: str) -> Rollout:
    """Start a rollout in which these parts raise or wait."""
    metadata = ", ".join(f'"{part}": "{how}"' for part, how in parts.items())
    return world.start(*says, metadata_json=f"{{{metadata}}}", limits=Limits(turns=1, seconds=60))


@pytest.mark.parametrize(("where", "how", "says", "told", "end"), ENDINGS)
async def test_cleanup_runs_once_after_everything_else(
    new_world: type[RuntimeHarness], where: str, how: str, says: list[Say], told: list[str], end: str | Category
) -> None:
    agent = Sandboxed()
    world = new_world(agent)
    rollout = start(world, *says, **({where: how} if where else {}))
    await asyncio.sleep(10)
    if end == "cancel":
        world.roster.cancel(ALL, "not needed")
    elif end == "drain":
        await world.roster.drain(0)
    outcome = await outcome_of(rollout)
    await asyncio.sleep(20)
    assert agent.told == {rollout.uid: [*told, "cleanup"]}
    assert outcome.warnings == ()
    if isinstance(outcome.end, Failure):
        assert outcome.end.category is REQUESTED.get(end, end)  # type: ignore[call-overload]
    else:
        assert outcome.end == (Cancellation("not needed") if end == "cancel" else Stop(str(end)))
    assert outcome.reward_result.reward == (0.5 if isinstance(outcome.end, Stop) else None)


async def test_a_setup_that_fails_shows_no_insides(
    new_world: type[RuntimeHarness], caplog: pytest.LogCaptureFixture
) -> None:
    world = new_world(Sandboxed())
    rollout = start(world, setup="raises")
    outcome = await outcome_of(rollout)
    assert_internal(outcome)
    assert "The agent's setup failed in turn 0" in outcome.end.message  # type: ignore[union-attr]
    assert world.script(rollout).asks == []
    assert "agent sandboxed: setup() failed at " in caplog.text


async def test_a_rollout_that_never_ran_is_neither_set_up_nor_cleaned_up(new_world: type[RuntimeHarness]) -> None:
    agent = Sandboxed()
    world = new_world(agent, capacity=Capacity(running=1))
    rollouts = [start(world, play="waits"), start(world)]
    await asyncio.sleep(1)
    world.roster.cancel(ALL, "not needed")
    for rollout in rollouts:
        await outcome_of(rollout)
    assert list(agent.told) == ["u1"]


async def test_two_hundred_rollouts_of_which_half_are_cancelled_share_nothing(
    new_world: type[RuntimeHarness],
) -> None:
    agent = Sandboxed()
    world = new_world(agent, capacity=Capacity(running=200))
    rollouts = [start(world, Say("8", seconds=2 + number % 7)) for number in range(200)]
    await asyncio.sleep(1)
    world.roster.cancel(Selection(ME, uids=tuple(rollout.uid for rollout in rollouts[::2])), "not needed")
    ends = [(await outcome_of(rollout)).end for rollout in rollouts]
    assert ends == [Cancellation("not needed"), Stop("stop")] * 100
    for cancelled, finished in zip(rollouts[::2], rollouts[1::2], strict=True):
        assert agent.told[cancelled.uid] == [*BEGUN, "cleanup"]
        assert agent.told[finished.uid] == [*WHOLE, "cleanup"]


class Failing(Sandboxed):
    """The cleanup fails in an unusual way."""

    async def cleanup(self, run: Run) -> None:
        match run.metadata["cleanup"]:
            case "exits":
                sys.exit(1)
            case "cancels":
                raise asyncio.CancelledError
            case "samples":
                await run.sample()
            case _:
                raise LookupError(SECRET)


@pytest.mark.parametrize("how", ["raises", "exits", "cancels", "samples"])
@pytest.mark.parametrize("end", ["stop", "failure", "cancel"])
async def test_a_cleanup_that_fails_is_only_a_warning(
    new_world: type[RuntimeHarness], caplog: pytest.LogCaptureFixture, how: str, end: str
) -> None:
    world = new_world(Failing())
    play = {"failure": {"play": "raises"}, "cancel": {"play": "waits"}}
    rollout = start(world, cleanup=how, **play.get(end, {}))
    await asyncio.sleep(5)
    if end == "cancel":
        world.roster.cancel(ALL, "not needed")
    outcome = await outcome_of(rollout)
    kinds = {"failure": Failure, "cancel": Cancellation}
    assert isinstance(outcome.end, kinds.get(end, Stop))
    assert outcome.reward_result.reward == (0.5 if end == "stop" else None)
    assert [(each.code, each.message) for each in outcome.warnings] == [("cleanup_failed", FAILED)]
    assert f"agent sandboxed: cleanup() failed {'(' if how == 'cancels' else 'at '}{__file__}:" in caplog.text


async def test_a_cleanup_that_hangs_has_its_own_limit(
    new_world: type[RuntimeHarness], caplog: pytest.LogCaptureFixture
) -> None:
    class Hanging(Sandboxed):
        cleanup_seconds = 25

    world = new_world(Hanging())
    rollout = start(world, cleanup="waits")
    before = asyncio.get_running_loop().time()
    outcome = await outcome_of(rollout)
    assert asyncio.get_running_loop().time() - before == pytest.approx(1 + 25)
    assert (outcome.end, outcome.reward_result.reward) == (Stop("stop"), 0.5)
    assert outcome.metrics.total_ms == pytest.approx(1000)
    (warned,) = outcome.warnings
    assert (warned.code, warned.turn) == ("cleanup_failed", 1)
    assert warned.message.startswith("The agent's cleanup did not return within 25 s; ")
    assert f"cleanup() ({__file__}:" in caplog.text
    assert "did not return within 25 s at " in caplog.text
    await asyncio.sleep(6)
    assert "abandoned" not in caplog.text  # it was cancelled


async def test_an_outcome_is_neither_seen_nor_sent_before_its_cleanup_has_ended(
    new_world: type[RuntimeHarness],
) -> None:
    gate = asyncio.Event()

    class Slow(Sandboxed):
        async def cleanup(self, run: Run) -> None:
            await gate.wait()

    receiver = Receiver()
    world = new_world(Slow(), reporter=receiver)
    rollout, _ = world.wish(owing(world))
    await asyncio.sleep(5)
    assert (rollout.state, rollout.outcome, receiver.parcels) == (RolloutState.RUNNING, None, [])
    # An end that is requested now comes too late.
    world.roster.cancel(ALL, "not needed")
    await asyncio.sleep(1)
    assert rollout.outcome is None
    gate.set()
    assert (await outcome_of(rollout)).end == Stop("stop")
    await asyncio.sleep(1)
    assert len(receiver.parcels) == 1


class Stubborn(Sandboxed):
    """Swallow the cancellation of `play`, or of `cleanup`."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part
        self.free = asyncio.Event()

    async def reach(self, run: Run, part: str) -> None:
        await super().reach(run, part)
        while part == self.part and not self.free.is_set():
            with suppress(BaseException):
                await self.free.wait()


@pytest.mark.parametrize(("part", "seconds"), [("play", 5), ("cleanup", 10)])
@pytest.mark.parametrize("drains", [False, True])
async def test_what_ignores_its_cancellation_is_abandoned(
    new_world: type[RuntimeHarness], caplog: pytest.LogCaptureFixture, part: str, seconds: float, drains: bool
) -> None:
    agent = Stubborn(part)
    world = new_world(agent, Looping(), capacity=Capacity(running=1))
    rollout, waiting = start(world), world.start(agent="looping")
    await asyncio.sleep(5)
    before = asyncio.get_running_loop().time()
    if drains:
        await world.roster.drain(0)
    else:
        world.roster.cancel(Selection(ME, uids=(rollout.uid,)), "not needed")
    outcome = await outcome_of(rollout)
    if not drains:
        begun = 1 if part == "play" else 5 - 1  # the cleanup began after `play` and the reward
        assert asyncio.get_running_loop().time() - before == pytest.approx(
            seconds - (begun if part == "cleanup" else 0)
        )
        assert (await outcome_of(waiting)).end == Stop("stop")
    assert [each.code for each in outcome.warnings] == ["cleanup_failed"] * (part == "cleanup")
    await asyncio.sleep(6)
    assert f"{part} u1 ignores its cancellation and is abandoned at {__file__}:" in caplog.text
    assert agent.told["u1"].count("cleanup") == 1
    assert (world.roster.running, world.roster.queued) == (0, 0)
    agent.free.set()
    await asyncio.sleep(5)
    assert check_log(rollout) == outcome


async def test_a_cleanup_does_not_wait_for_ever_for_a_thread(
    new_world: type[RuntimeHarness], caplog: pytest.LogCaptureFixture
) -> None:
    free = threading.Event()

    class Stuck(Sandboxed):
        def setup(self, run: Run) -> None:  # type: ignore[override]
            free.wait()

    agent = Stuck()
    try:
        before = asyncio.get_running_loop().time()
        outcome = await outcome_of(start(new_world(agent)))
        assert asyncio.get_running_loop().time() - before == pytest.approx(60 + 5)
    finally:
        free.set()
    assert isinstance(outcome.end, Failure)
    assert (outcome.end.category, outcome.warnings) == (Category.TIMEOUT, ())
    assert agent.told == {"u1": ["cleanup"]}
    assert "is still running in its thread and is abandoned" in caplog.text


async def test_a_drain_waits_for_cleanups(new_world: type[RuntimeHarness]) -> None:
    class Slow(Sandboxed):
        cleanup_seconds = 40

        async def cleanup(self, run: Run) -> None:
            await asyncio.sleep(39)
            await super().cleanup(run)

    agent = Slow()
    world = new_world(agent)
    rollouts = [start(world, play="waits") for _ in range(3)]
    await asyncio.sleep(1)
    before = asyncio.get_running_loop().time()
    await world.roster.drain(2)
    assert asyncio.get_running_loop().time() - before == pytest.approx(2 + 1 + 39)
    for rollout in rollouts:
        outcome = check_log(rollout)
        assert isinstance(outcome.end, Failure)
        assert (outcome.end.category, outcome.warnings) == (Category.INTERRUPTED, ())
        assert agent.told[rollout.uid] == [*BEGUN, "cleanup"]


async def test_in_a_cleanup_the_run_can_be_read_and_not_continued(new_world: type[RuntimeHarness]) -> None:
    seen: dict[str, Any] = {}
    refused: list[str] = []

    class Looking(Agent):
        name = "looking"
        tools = (stall,)

        async def setup(self, run: Run) -> None:
            await run.append({"role": "user", "content": "Be quick."})
            run.state["key"] = run.uid

        async def reward(self, run: Run) -> float:
            return float(run.state["key"] == run.uid)

        async def cleanup(self, run: Run) -> None:
            seen.update(
                run.state, end=run.ending.end, truth=run.metadata["truth"], turn=run.turn, cancelled=run.cancelled
            )
            seen["last"] = run.messages[-1]["content"]
            run.note("cleanup", "not in the log")
            late = {"role": "user", "content": "late"}
            for work in (run.sample(), run.call([call("stall")]), run.append(late), run.fork(), run.finish("mine")):
                try:
                    await work
                except RolloutEnded as over:
                    refused.append(repr(over.end))
            with suppress(RolloutEnded):
                run.now()

    world = new_world(Looking())
    rollout = world.start(Say("8"), metadata_json='{"truth": 8}')
    outcome = await outcome_of(rollout)
    assert (outcome.end, outcome.reward_result.reward, outcome.warnings) == (Stop("stop"), 1.0, ())
    assert contents(outcome, "user") == ["5 + 3?", "Be quick."]
    assert seen == {"key": "u1", "end": Stop("stop"), "truth": 8, "turn": 1, "cancelled": True, "last": "8"}
    assert refused == [repr(Stop("stop"))] * 5
    assert len(world.script(rollout).asks) == 1
    kinds = [type(entry.record).__name__ for entry in rollout.log.entries]
    assert kinds[-2:] == ["Answered", "Ended"]


async def test_what_play_still_does_beside_the_cleanup_is_not_in_the_outcome(new_world: type[RuntimeHarness]) -> None:
    refused: list[str] = []

    class Undead(Sandboxed):
        async def play(self, run: Run) -> None:
            with suppress(asyncio.CancelledError):
                await wait(FOREVER)
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(6)
            try:
                await run.append({"role": "user", "content": "late"})
            except RolloutEnded as over:
                refused.append(repr(over.end))

        async def cleanup(self, run: Run) -> None:
            await asyncio.sleep(5)

    world = new_world(Undead())
    rollout = start(world)
    await asyncio.sleep(1)
    world.roster.cancel(ALL, "not needed")
    outcome = await outcome_of(rollout)
    assert refused == ["Cancellation(reason='not needed')"]
    assert (contents(outcome, "user"), outcome.warnings) == (["5 + 3?"], ())


async def test_a_setup_may_end_the_rollout(new_world: type[RuntimeHarness]) -> None:
    class Choosy(Sandboxed):
        async def setup(self, run: Run) -> None:
            await super().setup(run)
            await run.finish("nothing to do")

    agent = Choosy()
    outcome = await outcome_of(start(new_world(agent)))
    assert (outcome.end, outcome.reward_result.reward) == (Stop("nothing to do"), 0.5)
    assert agent.told == {"u1": ["setup", "reward", "cleanup"]}


async def test_a_setup_may_replace_the_conversation(new_world: type[RuntimeHarness]) -> None:
    class Rewording(Agent):
        name = "rewording"

        async def setup(self, run: Run) -> None:
            await run.fork([{"role": "user", "content": "8?"}], kind="compaction")

    outcome = await outcome_of(new_world(Rewording()).start())
    assert outcome.end == Stop("stop")
    assert contents(outcome, "user") == ["8?"]


async def test_an_agent_without_them_has_no_tasks_for_them(new_world: type[RuntimeHarness]) -> None:
    names: set[str] = set()

    class Plain(Agent):
        name = "plain"

        async def play(self, run: Run) -> None:
            await super().play(run)
            names.update(task.get_name().split()[0] for task in asyncio.all_tasks())

    class Half(Plain):
        name = "half"

        async def setup(self, run: Run) -> None: ...

    assert [Plain().overrides(part) for part in ("setup", "cleanup")] == [False, False]
    assert [Half().overrides(part) for part in ("setup", "cleanup")] == [True, False]
    await outcome_of(new_world(Plain()).start())
    assert names >= {"drive", "play"}
    assert not names & {"setup", "cleanup"}
