"""In any schedule of events, each rollout ends exactly once, with the last record of its log."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_server import Agent, Limits, Run, ToolError, tool
from rollout_server.core.error import RolloutError
from rollout_server.core.outcome import Category, Failure
from rollout_server.core.record import Ended
from rollout_server.runtime.outcome_delivery import DeliveryRefused, DeliveryUnsettled, PackedOutcome, Receipt
from rollout_server.runtime.ports import Credentials
from rollout_server.runtime.registry.dependencies import DeliveryRetryPolicy
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.rollout import Rollout, RolloutState
from rollout_server.runtime.start_request import Capacity

from tests.runtime.outcome_receivers import DOWN, RECEIVER, YES, Receiver
from tests.support.jumping_loop import JumpingLoop
from tests.support.runtime_harness import FOREVER, ME, RuntimeHarness, Say, Script, a_wish, call, wait

CAPACITY = Capacity(running=2, queued=3, finished=3, finished_seconds=20)


@tool
async def linger(seconds: float) -> float:
    """Returns later."""
    await wait(seconds)
    return seconds


@tool
async def refuse() -> str:
    """Raises a tool error."""
    raise ToolError("no")


class Moody(Agent):
    """`play` and `reward` behave as the request's metadata says."""

    name = "moody"
    tools = (linger, refuse)

    async def play(self, run: Run) -> None:
        match run.metadata["mood"]:
            case "crashing":
                await run.sample()
                raise LookupError
            case "curt":
                await run.call((await run.sample()).tool_calls)
                await run.finish("enough")
            case "sleepy":
                await super().play(run)
                await wait(7)
            case "deaf":
                with suppress(BaseException):
                    await super().play(run)
                with suppress(BaseException):
                    await wait(3)
                await run.sample()
            case "hasty":
                await asyncio.gather(run.sample(), run.sample())
            case _:
                await super().play(run)

    async def reward(self, run: Run) -> float | None:
        match run.metadata["verdict"]:
            case "crash":
                raise LookupError
            case "slow":
                await wait(3)
            case "nan":
                return float("nan")
        return 1.0


times = st.sampled_from((0.0, 0.5, 1.0, 2.0, 5.0))
calls = st.one_of(
    times.map(lambda seconds: call("linger", seconds=seconds)),
    st.sampled_from((call("refuse"), call("unknown"), call("linger", seconds="1"))),
)
says = st.builds(
    Say,
    text=st.just("8"),
    calls=st.lists(calls, max_size=3).map(tuple),
    tokens=st.integers(0, 3),
    seconds=times | st.just(FOREVER),
    failure=st.sampled_from((None, None, None, Failure(Category.NETWORK, "nobody there"))),
)


@dataclass(frozen=True)
class Start:
    says: list[Say]
    mood: str
    verdict: str
    request_id: str
    until_received: bool
    limits: Limits
    priority: int
    grace: float | None
    owes: bool


@dataclass(frozen=True)
class Act:
    what: str
    which: int
    seconds: float


starts = st.builds(
    Start,
    says=st.lists(says, min_size=1, max_size=4),
    mood=st.sampled_from(("default", "crashing", "curt", "sleepy", "deaf", "hasty")),
    verdict=st.sampled_from(("number", "number", "crash", "slow", "nan")),
    request_id=st.sampled_from(("", "a", "b")),
    until_received=st.booleans(),
    limits=st.builds(
        Limits,
        turns=st.sampled_from((1, 2, 40)),  # never 0: turns without duration would repeat forever in virtual time
        generated_tokens=st.sampled_from((None, 2)),
        seconds=st.sampled_from((4.0, 30.0)),
        tool_turns=st.sampled_from((None, 1)),
        calls_per_turn=st.sampled_from((None, 1)),
    ),
    priority=st.integers(-1, 1),
    grace=st.sampled_from((None, None, 0.0, 3.0)),
    owes=st.booleans(),
)
acts = st.builds(
    Act,
    what=st.sampled_from(("cancel", "cancel all", "watch", "watch", "acknowledge", "forget", "drain")),
    which=st.integers(0, 9),
    seconds=times,
)
schedules = st.lists(st.tuples(times, starts | acts), max_size=25)
receipts = st.lists(
    st.sampled_from((YES, DOWN, DOWN, DeliveryUnsettled("later", 5.0), DeliveryRefused("no"), LookupError())),
    min_size=1,
    max_size=9,
)


class Watchful(Receiver):
    """A receiver that checks each delivery: the rollout still owes it, and all its deliveries have equal bytes."""

    def __init__(self, receipts: list[Receipt | Exception], seconds: float) -> None:
        super().__init__(*receipts, seconds=seconds)
        self.rollouts: list[Rollout] = []
        self.bodies: dict[str, bytes] = {}
        self.wrong: list[str] = []

    async def deliver(self, parcel: PackedOutcome) -> Receipt:
        (rollout,) = [each for each in self.rollouts if parcel.key == f"{each.uid}/outcome"]
        same = self.bodies.setdefault(parcel.key, parcel.body) == parcel.body
        if not (rollout.owes and same and parcel.credential == "hunter2"):
            self.wrong.append(parcel.key)
        return await super().deliver(parcel)


@dataclass
class Play:
    """A schedule in progress."""

    world: RuntimeHarness
    watchers: list[asyncio.Task[None]] = field(default_factory=list)

    def start(self, wanted: Start) -> None:
        rollout_id = "shared" if wanted.request_id else f"r{len(self.world.rollouts)}"
        self.world.scripts[rollout_id] = Script(*wanted.says)
        wish = a_wish(
            wanted.request_id,
            until_received=wanted.until_received,
            rollout_id=rollout_id,
            limits=wanted.limits,
            priority=wanted.priority,
            cancel_after_detach=wanted.grace,
            metadata_json=json.dumps({"mood": wanted.mood, "verdict": wanted.verdict}),
            outcome=RECEIVER if wanted.owes else None,
        )
        wish = replace(wish, credentials=Credentials(outcome="hunter2"))
        with suppress(RolloutError):  # busy, draining or a conflict: no rollout was started
            self.world.wish(wish)

    def act(self, act: Act) -> None:
        roster, rollouts = self.world.roster, self.world.rollouts
        chosen = rollouts[act.which % len(rollouts)] if rollouts else None
        if act.what == "cancel all":
            roster.cancel(Selection(ME), "all")
        elif act.what == "forget":
            roster.forget()
        elif act.what == "drain":
            self.watchers.append(asyncio.create_task(roster.drain(act.seconds)))
        elif chosen is None:
            return
        elif act.what == "cancel":
            roster.cancel(Selection(ME, uids=(chosen.uid,)), "one")
        elif act.what == "acknowledge":
            with suppress(RolloutError):
                roster.acknowledge(chosen.uid, ME)
        else:
            self.watchers.append(asyncio.create_task(self.watch(chosen, act)))

    async def watch(self, rollout: Rollout, act: Act) -> None:
        """Watch for a while, then resume, and assert that each entry was received once."""
        seen: list[int] = []
        with suppress(TimeoutError):
            async with asyncio.timeout(act.seconds):
                with rollout.attached():
                    async for entry in rollout.log.follow(0):
                        seen.append(entry.sequence)
                        await asyncio.sleep(act.which / 10)
        seen.extend([entry.sequence async for entry in rollout.log.follow(len(seen))])
        assert seen == list(range(1, rollout.log.last_sequence + 1))
        assert isinstance(rollout.log.entries[-1].record, Ended)

    def check(self) -> None:
        """Assert the invariants that hold at any time."""
        roster = self.world.roster
        assert roster.running <= CAPACITY.running
        assert roster.queued <= CAPACITY.queued
        states = [rollout.state for _, rollout in roster.select(Selection(ME))]
        assert states.count(RolloutState.RUNNING) <= roster.running
        held = roster.owed + sum(rollout.owes for rollout in self.world.rollouts)
        assert states.count(RolloutState.FINISHED) <= CAPACITY.finished + CAPACITY.running + held
        assert roster.owed <= CAPACITY.finished + CAPACITY.running + CAPACITY.queued
        for rollout in self.world.rollouts:
            ends = [entry.sequence for entry in rollout.log.entries if isinstance(entry.record, Ended)]
            assert ends == [rollout.log.last_sequence] * (rollout.outcome is not None)
            told = rollout.outcome is not None and rollout.spec.outcome is not None
            assert (rollout.delivery is not None) is told
            if rollout.owes:
                assert roster.get(rollout.uid, ME) is rollout

    def check_deliveries(self) -> None:
        """Assert the final state of deliveries. Undelivered ones are lost with the server, and are still marked as undelivered."""
        for rollout in self.world.rollouts:
            if not rollout.owes:
                assert rollout.credentials in (Credentials(), Credentials(outcome=rollout.credentials.outcome))
                assert rollout.undelivered or rollout.credentials == Credentials()
            if rollout.delivery is not None and not rollout.delivery.attempts:
                assert rollout.received


async def play(schedule: list[tuple[float, Start | Act]], receiver: Watchful) -> None:
    playing = Play(
        RuntimeHarness(
            Moody(), capacity=CAPACITY, reporter=receiver, patience=DeliveryRetryPolicy(expiry=60, retries=4)
        )
    )
    receiver.rollouts = playing.world.rollouts
    for pause, what in schedule:
        await asyncio.sleep(pause)
        if isinstance(what, Start):
            playing.start(what)
        else:
            playing.act(what)
        playing.check()
    await playing.world.close()
    await asyncio.gather(*playing.watchers)
    playing.check()
    playing.check_deliveries()
    assert receiver.wrong == []


@settings(deadline=None)
@given(schedules, receipts, times | st.just(FOREVER))
def test_each_rollout_ends_exactly_once_whatever_happens(
    schedule: list[tuple[float, Start | Act]], receipts: list[Receipt | Exception], seconds: float
) -> None:
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        # From requests that impatient agents do not await.
        runner.get_loop().set_exception_handler(lambda loop, context: None)
        runner.run(play(schedule, Watchful(receipts, seconds)))
