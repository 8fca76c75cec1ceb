"""Logs of real rollouts, encoded and decoded: replaying them gives the same outcome."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import settings
from rollout_server import Agent, Run, tool
from rollout_server.core import record as records
from rollout_server.core.ledger import PolicyRun, pack_logprobs
from rollout_server.core.limits import Limits
from rollout_server.core.machine import Machine, replay
from rollout_server.core.message import Message
from rollout_server.core.outcome import Cancellation, Category, Failure, Outcome, RewardResult, Stop
from rollout_server.core.record import Answered, Record
from rollout_server.core.segment import Plane
from rollout_server.core.spec import Dialect, Spec, StaleAction, Staleness, Target
from rollout_server.edge.journal.records import CODECS, decode_entries, encode_entries
from rollout_server.edge.journal.starts import decode_start, encode_start
from rollout_server.runtime.capture.endpoint import FinishedWork
from rollout_server.runtime.journal import AcceptedStart
from rollout_server.runtime.log import Entry
from rollout_server.runtime.models import ModelCompletion, ModelEndpoint, ModelLimits
from rollout_server.runtime.ports import CompletionRequest, Sampler, Tool
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.start_request import StartRequest

from tests.core.test_random_rollouts import RandomRollouts
from tests.support.captured_agents import Elsewhere, message_of, model_call, user
from tests.support.jumping_loop import JumpingLoop
from tests.support.machine_records import shown_outcome
from tests.support.runtime_harness import (
    FOREVER,
    ME,
    RuntimeHarness,
    Say,
    Script,
    call,
    outcome_of,
)

HELP = {"role": "user", "content": "Help. ü€😀"}
JUDGE = Target("http://judge", Dialect.VLLM, model="large")


class DetailedScript(Script):
    """A script whose completions have all that a trainer can send."""

    async def sample(self, ask: CompletionRequest) -> Answered:
        sampled = await super().sample(ask)
        count, turn = len(sampled.token_ids or ()), ask.asked.turn
        return replace(
            sampled,
            logprobs=pack_logprobs([-0.1 * turn] * count) if turn % 3 else None,
            planes=(Plane("routed_experts", "uint8", bytes(range(2 * count))),),
            runs=(PolicyRun(count, f"policy-{turn}", turn),) if turn % 2 else (),
            usage=(10, count),
            notes=(("resampled", "sent twice"),),
            around=("ü€", "\ud83d") if sampled.reported is not None else ("", ""),
            extra_json='{"seed": 123456789012345678901234567890}',
            elapsed_ms=0.1 * turn,
        )


class ScriptedJudge:
    """A further model with one completion."""

    endpoints: Mapping[str, ModelEndpoint] = {"judge": ModelEndpoint(JUDGE, "kEy")}
    limits = ModelLimits()

    async def complete(self, target: Target, request: CompletionRequest) -> ModelCompletion:
        return ModelCompletion(Message.write({"role": "assistant", "content": "good"}), "stop", (3, 1), 2)

    def open(self, target: Target, spec: Spec, tools: Sequence[Tool]) -> Sampler:
        raise NotImplementedError


@tool
async def divide(a: int, b: int) -> float:
    """Divide two numbers."""
    return a / b


class Busy(Agent):
    """Leaves records of each kind, except of an agent that owns its loop."""

    name = "busy"
    version = "2 ü"
    tools = (divide,)
    reward_rule = "own"

    async def play(self, run: Run) -> None:
        reply = await run.sample(temperature=0.5, stop=["\n"])
        await run.call(reply.tool_calls)
        run.give_reward(0.1)
        run.mask(reply, "too long")
        run.note("halfway", "ü€😀")
        await run.append(HELP, {"role": "user", "content": ""})
        run.random().random()

        async def effect() -> dict[str, str]:
            return {"now": run.now().isoformat()}

        await run.once(effect)
        await run.model("judge").sample([HELP])
        await run.sample()
        await run.sample()
        critic = await run.fork([HELP], role="critic", trainable=False, tools=[divide])
        branch = await run.fork(after=reply)
        await asyncio.gather(critic.sample(), branch.sample(), run.sample())
        late = asyncio.create_task((await run.fork()).sample())
        await asyncio.sleep(0.5)
        late.cancel()
        await asyncio.sleep(0.5)
        shorter = await run.fork([HELP], kind="compaction")
        await shorter.sample()

    async def reward(self, run: Run) -> RewardResult:
        return RewardResult(0.1 + 0.2, {"b": 1.0, "a": 1 / 3}, '{"why": "ü"}', {"critic": -1.0})


SAYS = (
    Say("8", (call("divide", "a", a=8, b=2), call("divide", "b", a=1, b=0), call("unknown", "c")), tokens=3),
    Say("9", reported=(1, 10, 11, 12, 77), tokens=4, step=3),
    Say("10", reported=(7, 7, 7)),
    Say("", tokens=0),
    Say("11"),
    Say("12", tokens=2),
    Say("late", seconds=FOREVER),
    Say("13", step=9),
)


def started(rollout: Rollout) -> AcceptedStart:
    """A rollout's start, after encoding and decoding."""
    start = AcceptedStart(rollout.uid, StartRequest(rollout.spec, "me"), "f00d", "1", 1.7e9)
    read = decode_start(encode_start(start))
    assert read == start
    return read


def stored(entries: Sequence[Entry]) -> list[Entry]:
    """Entries after encoding and decoding in batches of different lengths."""
    chance, read = random.Random(1), list[Entry]()
    while len(read) < len(entries):
        batch = entries[len(read) : len(read) + chance.randint(1, 5)]
        read += decode_entries(encode_entries(batch))
    return read


def check(rollout: Rollout) -> set[type[Record]]:
    """Check that the decoded log gives the rollout's outcome. Return the classes of its records."""
    start, entries = started(rollout), stored(rollout.log.entries)
    assert entries == list(rollout.log.entries)
    spec = start.request.spec
    again = replay(
        Machine(start.uid, spec.messages, spec.limits, spec.staleness), [entry.record for entry in entries]
    ).outcome
    assert again is not None
    assert rollout.outcome is not None
    assert shown_outcome(again) == shown_outcome(rollout.outcome)
    return {type(entry.record) for entry in entries}


def run(play: Callable[[RuntimeHarness], Awaitable[Rollout]], agent: Agent) -> tuple[Outcome, set[type[Record]]]:
    """Run a rollout until it has ended, and check its log. Return its outcome and the classes of its records."""

    async def until_ended() -> tuple[Outcome, set[type[Record]]]:
        harness = RuntimeHarness(agent, models=ScriptedJudge())
        harness.new_script = DetailedScript
        rollout = await play(harness)
        outcome = await outcome_of(rollout)
        await harness.close()
        return outcome, check(rollout)

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(until_ended())


def test_a_rollout_with_records_of_nearly_every_kind() -> None:
    async def play(harness: RuntimeHarness) -> Rollout:
        return harness.start(
            *SAYS,
            limits=Limits(seconds=1000 / 3),
            staleness=Staleness(2, StaleAction.MASK),
            labels={"b": "1", "a": "2"},
            group_index=0,
        )

    outcome, kinds = run(play, Busy())
    assert outcome.end == Stop("stop")
    assert outcome.reward_result.scores == {"b": 1.0, "a": 1 / 3}
    assert len(outcome.segments) >= 4
    assert CODECS.keys() - kinds == {records.CaptureSettled, records.Resumed}


def test_an_agent_that_owns_its_loop() -> None:
    async def play(harness: RuntimeHarness) -> Rollout:
        rollout = harness.start(Say("8"), Say("9"), Say("10"), Say("A title"))
        ask, go = user("5 + 3?"), user("Go on.")
        await called(rollout, ask)
        other = await called(rollout, ask)
        await called(rollout, ask, other, go)
        await called(rollout, user("Name this chat."), auxiliary=True, client_agent="sub-1")
        await rollout.capture.finish(FinishedWork(RewardResult(0.5, {"tests": 1.0})))
        return rollout

    outcome, kinds = run(play, Elsewhere())
    assert outcome.end == Stop("stop")
    assert outcome.capture is not None
    assert outcome.capture.parted == 2
    assert {records.CaptureSettled, records.Forked, records.Masked} <= kinds


async def called(rollout: Rollout, *messages: Mapping[str, Any], **fields: Any) -> Mapping[str, Any]:
    """Call the model and confirm the completion. Return the message."""
    completed = await rollout.capture.call(model_call(*messages, **fields))
    await rollout.capture.confirm(completed.id)
    return message_of(completed)


def test_a_rollout_that_failed() -> None:
    failure = Failure(Category.RATE_LIMITED, "too many requests ü", 2, 429)

    async def play(harness: RuntimeHarness) -> Rollout:
        return harness.start(SAYS[0], Say(failure=failure))

    outcome, _ = run(play, Busy())
    assert isinstance(outcome.end, Failure)
    assert (outcome.end.category, outcome.end.http_status) == (Category.RATE_LIMITED, 429)


def test_a_rollout_that_was_cancelled() -> None:
    async def play(harness: RuntimeHarness) -> Rollout:
        rollout = harness.start(SAYS[0], Say(seconds=FOREVER))
        await asyncio.sleep(1)
        harness.roster.cancel(Selection(ME), "enough ü")
        return rollout

    outcome, _ = run(play, Busy())
    assert outcome.end == Cancellation("enough ü")


class StoredRollouts(RandomRollouts):
    """Any legal rollout; what is replayed at its end is its log after encoding and decoding."""

    def _replays(self) -> None:
        entries = [Entry(number, 1.7e9 + number, record) for number, record in enumerate(self.log, start=1)]
        read = stored(entries)
        assert read == entries
        again = replay(self._machine(), [entry.record for entry in read])
        assert again.outcome is not None
        assert self.machine.outcome is not None
        assert shown_outcome(again.outcome) == shown_outcome(self.machine.outcome)


TestStoredRollouts = StoredRollouts.TestCase
TestStoredRollouts.settings = settings(stateful_step_count=30, max_examples=50)
