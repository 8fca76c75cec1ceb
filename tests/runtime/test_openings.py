"""Runs of an agent with a loop of its own: branches after earlier turns, conversations for calls, and turns that only fail."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from rollout_server import Agent, Run, tool
from rollout_server.core.capture.report import CaptureReport
from rollout_server.core.ledger import Origin, Parting, Role, SegmentKind
from rollout_server.core.limits import Limits
from rollout_server.core.message import Message
from rollout_server.core.outcome import Cancellation, Category, Failure, FailureClass, Outcome, Stop
from rollout_server.core.record import CaptureSettled, Forked, GivenUp, Note
from rollout_server.runtime.errors import AgentMistake, PromptTooLong, RolloutEnded, RolloutFailed
from rollout_server.runtime.ports import CompletionRequest, Fork
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.run.messages import Reply
from rollout_server.runtime.run.opening import Opening

from tests.support.runtime_harness import FOREVER, RuntimeHarness, Say, Script, outcome_of

MAIN, BRANCH, SUBAGENT = SegmentKind.MAIN, SegmentKind.BRANCH, SegmentKind.SUBAGENT
COMPACTION, DRIFT = SegmentKind.COMPACTION, SegmentKind.DRIFT
HELP = {"role": "user", "content": "Help."}
PROMPT = (Message.write({"role": "user", "content": "Begin."}),)
PARTED = Parting(1, "content", "8", "9", "chat")
TOO_LONG = PromptTooLong(
    Failure(Category.VALIDATION, "turn 2: it does not fit", 2, 400, FailureClass.POLICY), 5000, 4096
)


@tool
async def ping() -> str:
    """Answers."""
    return "pong"


@dataclass
class Playing(Agent):
    """An agent whose play is a function of the test."""

    play_it: Any
    name = "playing"
    judged: list[object] = field(default_factory=list)

    async def play(self, run: Run) -> None:
        await self.play_it(run)

    async def reward(self, run: Run) -> float:
        self.judged.extend(message["content"] for message in run.messages)
        return 1.0


async def played(world: type[RuntimeHarness], play: Any, *says: Say, **spec: Any) -> tuple[Rollout, Outcome, Script]:
    """Play one rollout and return it, its outcome and its sampler."""
    harness = world(Playing(play))
    rollout = harness.start(*says, **spec)
    return rollout, await outcome_of(rollout), harness.script(rollout)


def records(rollout: Rollout, kind: type) -> list[Any]:
    return [entry.record for entry in rollout.log.entries if isinstance(entry.record, kind)]


async def test_a_branch_begins_right_after_an_earlier_completion(new_world: type[RuntimeHarness]) -> None:
    seen: list[list[object]] = []

    async def play(run: Run) -> None:
        first = await run.sample()
        await run.append(HELP)
        second = await run.sample()
        early, last = await run.fork(after=first), await run.fork(after=second, role="critic", trainable=False)
        for branch in (early, last):
            seen.append([message["content"] for message in branch.messages])
            await branch.append({"role": "user", "content": "Or?"})
            await branch.sample()

    rollout, outcome, script = await played(new_world, play, Say("a"), Say("b"), Say("c"), Say("d"))
    assert seen == [["5 + 3?", "a"], ["5 + 3?", "a", "Help.", "b"]]
    assert [(each.after_turn, each.count) for each in records(rollout, Forked)] == [(1, 2), (2, 4)]
    assert [fork.earlier for fork in script.forks] == [True, False]
    origins = [(each.origin.kind, each.origin.parent_tokens, each.role.name) for each in outcome.segments]
    assert origins == [(MAIN, 0, "agent"), (BRANCH, 2, "agent"), (BRANCH, 4, "critic")]
    assert [ask.last and ask.last.turn for ask in script.asks] == [None, 1, 1, 2]
    assert [ask.last_messages for ask in script.asks] == [0, 1, 1, 3]


async def test_a_branch_begins_while_the_conversation_waits_and_after_it_was_closed(
    new_world: type[RuntimeHarness],
) -> None:
    async def play(run: Run) -> None:
        first = await run.sample()
        await run.append(HELP)
        waiting = asyncio.create_task(run.sample())
        await asyncio.sleep(0)
        await (await run.fork(after=first)).sample()
        await waiting
        await run.fork([HELP], kind="compaction")
        await (await run.fork(after=first)).sample()

    _, outcome, script = await played(new_world, play, Say("a"), Say("b", seconds=5), Say("c"))
    assert outcome.end == Stop("stop")
    assert [fork.earlier for fork in script.forks] == [True, False, True]
    assert sorted(segment.origin.parent_tokens for segment in outcome.segments) == [0, 2, 2]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"after": "the first"}, "is not a completion of this conversation"),
        ({"after": Reply({}, (), "stop", 9)}, "is not a completion of this conversation"),
        ({"after": Reply({}, (), "stop", 1), "messages": [HELP]}, "after is for a branch"),
        ({"after": Reply({}, (), "stop", 1), "kind": "branch", "messages": [HELP]}, "takes no messages"),
    ],
)
async def test_a_branch_after_something_else_is_a_mistake(
    new_world: type[RuntimeHarness], arguments: dict[str, Any], text: str
) -> None:
    async def play(run: Run) -> None:
        await run.sample()
        with pytest.raises(AgentMistake, match=text):
            await run.fork(**arguments)

    rollout, outcome, _ = await played(new_world, play)
    assert (outcome.end, records(rollout, Forked)) == (Stop("stop"), [])


async def test_a_completion_of_another_conversation_is_a_mistake(new_world: type[RuntimeHarness]) -> None:
    async def play(run: Run) -> None:
        await run.sample()
        other = await (await run.fork([HELP])).sample()
        with pytest.raises(AgentMistake, match="is not a completion of this conversation"):
            await run.fork(after=other)

    assert (await played(new_world, play))[1].end == Stop("stop")


async def test_the_calls_of_an_agent_open_conversations(new_world: type[RuntimeHarness]) -> None:
    async def play(run: Run) -> None:
        main = await run.open(Opening(MAIN, PROMPT, (ping,)))
        assert [each.name for each in main.tools] == ["ping"]
        first = await main.sample()
        await main.append(HELP)
        waiting = asyncio.create_task(main.attempt())
        await asyncio.sleep(0)
        branch = await main.open(Opening(BRANCH, after_turn=first.turn, parting=PARTED))
        apart = [await main.open(Opening(kind, PROMPT, (), parting=PARTED)) for kind in (SUBAGENT, COMPACTION, DRIFT)]
        await asyncio.gather(branch.attempt(), *(each.attempt() for each in apart), waiting)
        assert [each.name for each in branch.tools] == ["ping"]
        assert [list(each.tools) for each in apart] == [[]] * 3
        await main.append(HELP)
        await main.sample()

    rollout, outcome, _ = await played(new_world, play, Say("a"), Say("b", seconds=1), Say("c"))
    assert outcome.end == Stop("stop")
    found = {segment.id: segment.origin for segment in outcome.segments}
    assert found == {
        "0": Origin(MAIN),
        "1": Origin(BRANCH, "0", 2, PARTED),
        "2": Origin(SUBAGENT, "0", 0, PARTED),
        "3": Origin(COMPACTION, "0", 0, PARTED),
        "4": Origin(DRIFT, "0", 0, PARTED),
    }
    assert [each.tools for each in records(rollout, Forked)] == [("ping",), ("ping",), (), (), ()]
    assert outcome.messages[0] == PROMPT[0]
    assert [message.role for message in outcome.messages] == ["user", "assistant"] + ["user", "assistant"] * 2


async def test_the_first_call_with_the_same_tools_keeps_the_sampler(new_world: type[RuntimeHarness]) -> None:
    async def play(run: Run) -> None:
        main = await run.open(Opening(MAIN, PROMPT, role=Role("coder")))
        await main.sample()
        with pytest.raises(AgentMistake, match="does not fit"):
            await main.open(Opening(MAIN, PROMPT))

    _, outcome, script = await played(new_world, play)
    assert (script.forks, [segment.role.name for segment in outcome.segments]) == ([], ["coder"])
    assert (outcome.end, outcome.messages[0]) == (Stop("stop"), PROMPT[0])


WRONG = [
    Opening(BRANCH),
    Opening(BRANCH, after_turn=2),
    Opening(BRANCH, PROMPT, after_turn=1),
    Opening(BRANCH, tools=(), after_turn=1),
    Opening(MAIN, PROMPT),
    Opening(SUBAGENT),
    Opening(SUBAGENT, PROMPT, after_turn=1),
    Opening(COMPACTION, PROMPT),
    Opening(DRIFT, PROMPT),
    Opening(SegmentKind.GAP, PROMPT, parting=PARTED),
]


@pytest.mark.parametrize("opening", WRONG)
async def test_an_opening_that_does_not_fit_is_a_mistake(new_world: type[RuntimeHarness], opening: Opening) -> None:
    async def play(run: Run) -> None:
        await run.sample()
        with pytest.raises(AgentMistake, match="does not fit"):
            await run.open(opening)

    rollout, outcome, _ = await played(new_world, play)
    assert (outcome.end, records(rollout, Forked)) == (Stop("stop"), [])


class Single(Script):
    """A trainer of one conversation."""

    def fork(self, fork: Fork) -> Script:
        raise RolloutFailed(Failure(Category.VALIDATION, "only one", source=FailureClass.ENVIRONMENT))


async def test_a_trainer_of_one_conversation_refuses_a_call_and_the_rollout_goes_on(
    new_world: type[RuntimeHarness],
) -> None:
    async def play(run: Run) -> None:
        run = await run.open(Opening(MAIN, PROMPT))
        for opening in (Opening(SUBAGENT, PROMPT), Opening(MAIN, PROMPT, (ping,))):
            with pytest.raises(RolloutFailed, match="only one"):
                await run.open(opening)
        reply = await run.sample()
        with pytest.raises(RolloutFailed, match="only one"):
            await run.open(Opening(BRANCH, after_turn=reply.turn))
        await run.append(HELP)
        await run.sample()

    harness = new_world(Playing(play))
    rollout = harness.start()
    harness.scripts["r1"] = Single(Say("a"))
    outcome = await outcome_of(rollout)
    assert (outcome.end, len(outcome.segments), len(records(rollout, Forked))) == (Stop("stop"), 1, 1)


async def test_after_the_end_nothing_is_opened(new_world: type[RuntimeHarness]) -> None:
    async def play(run: Run) -> None:
        await run.sample()
        with pytest.raises(RolloutEnded):
            await run.sample()
        with pytest.raises(RolloutEnded):
            await run.open(Opening(SUBAGENT, PROMPT))
        raise RolloutEnded(run.ending.end)

    rollout, outcome, _ = await played(new_world, play, limits=Limits(turns=1))
    assert (outcome.end, records(rollout, Forked)) == (Stop("max_turns"), [])


async def test_a_prompt_that_is_too_long_ends_only_its_conversation(new_world: type[RuntimeHarness]) -> None:
    async def play(run: Run) -> None:
        first = await run.sample()
        await run.append(HELP)
        with pytest.raises(PromptTooLong) as error:
            await run.attempt()
        assert (error.value.tokens, error.value.maximum) == (5000, 4096)
        with pytest.raises(AgentMistake, match="closed after turn 2"):
            await run.attempt()
        await (await run.open(Opening(BRANCH, after_turn=first.turn, parting=PARTED))).attempt()
        shorter = await run.open(Opening(COMPACTION, PROMPT, parting=PARTED))
        await shorter.attempt()
        run.settle(shorter, CaptureReport(continued=1, parted=2))

    rollout, outcome, _ = await played(new_world, play, Say("a"), Say(error=TOO_LONG), Say("c"))
    assert outcome.end == Stop("stop")
    assert records(rollout, GivenUp) == [GivenUp(2, "0")]
    assert [note.code for note in records(rollout, Note)] == ["prompt_refused"]
    assert [segment.origin.kind for segment in outcome.segments] == [MAIN, BRANCH, COMPACTION]
    assert outcome.messages[0] == PROMPT[0]


async def test_a_first_prompt_that_is_too_long_may_be_shortened(new_world: type[RuntimeHarness]) -> None:
    async def play(run: Run) -> None:
        first = await run.open(Opening(MAIN, PROMPT))
        with pytest.raises(PromptTooLong):
            await first.attempt()
        second = await first.open(Opening(MAIN, PROMPT))
        await second.attempt()
        assert run.latest is second

    _, outcome, _ = await played(new_world, play, Say(error=TOO_LONG), Say("b"))
    assert outcome.end == Stop("stop")
    assert [(each.id, each.origin) for each in outcome.segments] == [("1", Origin(MAIN))]


async def test_a_loop_of_the_server_ends_with_a_prompt_that_is_too_long(new_world: type[RuntimeHarness]) -> None:
    async def play(run: Run) -> None:
        await run.sample()

    rollout, outcome, _ = await played(new_world, play, Say(error=TOO_LONG))
    assert isinstance(outcome.end, Failure)
    assert (outcome.end.failure_class, records(rollout, GivenUp)) == (FailureClass.POLICY, [])


async def test_any_other_failure_of_an_attempt_ends_the_rollout(new_world: type[RuntimeHarness]) -> None:
    async def play(run: Run) -> None:
        await run.attempt()

    failure = Failure(Category.NETWORK, "gone", source=FailureClass.TRAINER)
    _, outcome, _ = await played(new_world, play, Say(failure=failure))
    assert isinstance(outcome.end, Failure)
    assert outcome.end.message == "gone"


async def test_an_attempt_that_is_cancelled_ends_only_its_conversation(new_world: type[RuntimeHarness]) -> None:
    async def play(run: Run) -> None:
        first = await run.sample()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await run.attempt()
        await (await run.open(Opening(BRANCH, after_turn=first.turn))).attempt()

    rollout, outcome, _ = await played(new_world, play, Say("a"), Say(seconds=FOREVER), Say("c"))
    assert (outcome.end, records(rollout, GivenUp)) == (Stop("stop"), [GivenUp(2, "0")])


async def test_the_settled_conversation_is_rewarded(new_world: type[RuntimeHarness]) -> None:
    async def play(run: Run) -> None:
        main = await run.open(Opening(MAIN, PROMPT))
        await main.sample()
        other = await main.open(Opening(DRIFT, PROMPT, parting=PARTED))
        await other.sample()
        await other.append(HELP)
        await other.sample()
        run.settle(chosen[-1](run, main, other), CaptureReport(parted=1))
        told.append(run.latest is chosen[-1](run, main, other))

    chosen: list[Any] = [lambda run, main, other: other]
    told: list[bool] = []
    agent = Playing(play)
    rollout = new_world(agent).start(Say("a"), Say("b"), Say("c"))
    outcome = await outcome_of(rollout)
    assert agent.judged == ["Begin.", "b", "Help.", "c"] == [each.fields()["content"] for each in outcome.messages]
    assert outcome.capture == CaptureReport(parted=1)
    for pick in (lambda run, main, other: main, lambda run, main, other: run):
        chosen.append(pick)
        agent.judged.clear()
        await outcome_of(new_world(agent).start(Say("a"), Say("b"), Say("c")))
        assert agent.judged == ["Begin.", "a"]
    assert told == [True, True, True]


@pytest.mark.parametrize("end", ["stop", "cancel", "time", "failure"])
async def test_what_is_left_is_recorded_before_the_end_is_decided(new_world: type[RuntimeHarness], end: str) -> None:
    async def play(run: Run) -> None:
        def settle() -> None:
            run.mask(reply, "abandoned")
            run.settle(run, CaptureReport(abandoned=1))

        reply = await run.sample()
        run._context.before_end.append(settle)
        if end == "failure":
            raise LookupError
        if end != "stop":
            await asyncio.sleep(FOREVER if end == "time" else 5)

    rollout = new_world(Playing(play)).start(Say("a"), limits=Limits(seconds=60))
    if end == "cancel":
        asyncio.get_running_loop().call_later(1, rollout.ending.request, Cancellation("enough"))
    outcome = await outcome_of(rollout)
    kinds = {"stop": Stop, "cancel": Cancellation, "time": Failure, "failure": Failure}
    assert isinstance(outcome.end, kinds[end])
    assert outcome.capture == CaptureReport(abandoned=1)
    assert not any(span.trains for span in outcome.segments[0].spans)
    assert len(records(rollout, CaptureSettled)) == 1


async def test_a_fault_before_the_end_keeps_no_rollout_from_it(
    new_world: type[RuntimeHarness], caplog: pytest.LogCaptureFixture
) -> None:
    async def play(run: Run) -> None:
        def fails() -> None:
            raise LookupError("no such thing")

        await run.sample()
        run._context.before_end.append(fails)

    _, outcome, _ = await played(new_world, play)
    assert outcome.end == Stop("stop")
    assert "could not complete its records" in caplog.text


async def test_a_request_of_a_branch_has_the_ledger_of_its_turn(new_world: type[RuntimeHarness]) -> None:
    """A sampler finds the shared tokens in the ledger of the branch, whatever its parent has held since."""
    requests: list[tuple[list[int], Origin]] = []

    class Looking(Script):
        async def sample(self, ask: CompletionRequest) -> Any:
            requests.append((ask.ledger.prefix().tolist(), ask.ledger.origin))
            return await super().sample(ask)

        def fork(self, fork: Fork) -> Script:
            return self

    async def play(run: Run) -> None:
        first = await run.sample()
        await run.sample()
        await (await run.fork(after=first)).sample()

    harness = new_world(Playing(play))
    rollout = harness.start()
    harness.scripts["r1"] = Looking(Say("a"))
    await outcome_of(rollout)
    assert requests[2] == ([1, 10], Origin(BRANCH, "0", 2))
