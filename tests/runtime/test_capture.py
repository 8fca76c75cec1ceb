"""The model endpoint of a rollout: calls at the same time, repeated, given up and refused; its limits and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from rollout_server import Agent, ExternalAgent, Run
from rollout_server.core.capture.call import Completed
from rollout_server.core.error import AlreadyFinished, Busy, CallRefused, NotFound, RolloutOver
from rollout_server.core.ledger import SegmentKind
from rollout_server.core.limits import Limits
from rollout_server.core.outcome import Cancellation, Category, Failure, FailureClass, Outcome, RewardResult, Stop
from rollout_server.core.record import Asked, CaptureSettled, Masked, Note
from rollout_server.core.spec import Sampling
from rollout_server.runtime.capture import offered_tools
from rollout_server.runtime.capture.endpoint import MOST_CALLS, FinishedWork
from rollout_server.runtime.capture.offered_tools import ClientTool
from rollout_server.runtime.errors import AgentMistake, PromptTooLong, RolloutFailed
from rollout_server.runtime.ports import Fork
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.rollout import Rollout

from tests.support.captured_agents import Elsewhere, Fields, message_of, model_call, user
from tests.support.runtime_harness import (
    FOREVER,
    ME,
    RuntimeHarness,
    Say,
    Script,
    assert_internal,
    check_log,
    contents,
    outcome_of,
)

ASK = user("5 + 3?")
GO = user("Go on.")
OTHER = user("Name this chat.")
DONE = FinishedWork(RewardResult(0.5, {"tests": 1.0}))


def records(rollout: Rollout, kind: type[Any]) -> list[Any]:
    return [entry.record for entry in rollout.log.entries if isinstance(entry.record, kind)]


async def called(rollout: Rollout, *messages: Fields, confirm: bool = True, **fields: Any) -> Fields:
    """Call the model; return the message, as the client sends it back."""
    completed = await rollout.capture.call(model_call(*messages, **fields))
    if confirm:
        await rollout.capture.confirm(completed.id)
    return message_of(completed)


async def finished(rollout: Rollout, work: FinishedWork = DONE) -> Outcome:
    assert await rollout.capture.finish(work) is False
    return await outcome_of(rollout)


async def begun(rollout: Rollout, *messages: Fields, **fields: Any) -> asyncio.Task[Completed]:
    """Start a call, and let it reach its sampler."""
    task = asyncio.create_task(rollout.capture.call(model_call(*messages, **fields)))
    await asyncio.sleep(0.1)
    return task


async def test_a_history_that_goes_on_is_one_conversation(new_world: type[RuntimeHarness]) -> None:
    rollout = new_world(Elsewhere()).start(Say("8"), Say("9"))
    first = await called(rollout, ASK)
    await called(rollout, ASK, first, GO)
    outcome = await finished(rollout)
    assert outcome.end == Stop("stop")
    assert (outcome.reward_result.reward, outcome.reward_result.scores) == (0.5, {"tests": 1.0})
    assert [message.fields()["content"] for message in outcome.messages] == ["5 + 3?", "8", "Go on.", "9"]
    assert [segment.origin.kind for segment in outcome.segments] == [SegmentKind.MAIN]
    (settled,) = records(rollout, CaptureSettled)
    assert settled.segment_id == "0"
    assert (settled.report.continued, settled.report.parted) == (1, 0)
    assert outcome.capture == settled.report


async def test_the_first_call_replaces_the_prompt(new_world: type[RuntimeHarness]) -> None:
    rollout = new_world(Elsewhere()).start(Say("8"))
    await called(rollout, {"role": "system", "content": "Be brief."}, user("Read it."))
    outcome = await finished(rollout)
    assert [message.role for message in outcome.messages] == ["system", "user", "assistant"]
    assert [segment.origin.kind for segment in outcome.segments] == [SegmentKind.MAIN]


async def test_calls_of_two_conversations_are_sampled_at_the_same_time(new_world: type[RuntimeHarness]) -> None:
    rollout = new_world(Elsewhere()).start(Say("8", seconds=10))
    loop = asyncio.get_running_loop()
    before = loop.time()
    await asyncio.gather(*(called(rollout, user(f"Part {number}?")) for number in range(8)))
    assert loop.time() - before < 11  # virtual seconds: one after the other they would take 80
    outcome = await finished(rollout)
    assert len(outcome.segments) == 8
    assert outcome.end == Stop("stop")


async def test_two_equal_agents_get_an_answer_each(new_world: type[RuntimeHarness]) -> None:
    rollout = new_world(Elsewhere()).start(Say("8", seconds=1), Say("9", seconds=1))
    both = await asyncio.gather(called(rollout, ASK), called(rollout, ASK))
    assert sorted(message["content"] for message in both) == ["8", "9"]
    first, second = both
    await asyncio.gather(called(rollout, ASK, first, GO), called(rollout, ASK, second, GO))
    outcome = await finished(rollout)
    assert (len(outcome.segments), outcome.metrics.turns) == (2, 4)
    assert records(rollout, Masked) == []


async def test_a_caller_that_disconnects_cancels_nothing_and_gets_it_later(new_world: type[RuntimeHarness]) -> None:
    rollout = new_world(Elsewhere()).start(Say("8", seconds=10))
    lost = await begun(rollout, ASK)
    lost.cancel()
    await asyncio.sleep(1)
    assert (await called(rollout, ASK))["content"] == "8"
    outcome = await finished(rollout)
    assert outcome.metrics.turns == 1
    assert outcome.capture is not None
    assert outcome.capture.joined == 1


async def test_an_answer_that_was_lost_is_returned_again(new_world: type[RuntimeHarness]) -> None:
    rollout = new_world(Elsewhere()).start(Say("8"), Say("9"))
    lost = await rollout.capture.call(model_call(ASK))
    again = await rollout.capture.call(model_call(ASK))
    assert (again.id, again.message_json, again.replayed) == (lost.id, lost.message_json, True)
    await rollout.capture.confirm(again.id)
    await called(rollout, ASK, message_of(again), GO)
    outcome = await finished(rollout)
    assert outcome.metrics.turns == 2
    assert len(outcome.segments) == 1
    assert outcome.capture is not None
    assert outcome.capture.replayed == 1


async def test_equal_calls_at_the_same_time_get_an_answer_each(new_world: type[RuntimeHarness]) -> None:
    """Also those that arrive while the answer of another one is being sent."""
    rollout = new_world(Elsewhere()).start(*(Say(str(number)) for number in range(4)))

    async def call(number: int) -> str:
        await asyncio.sleep(number / 100)
        completed = await rollout.capture.call(model_call(ASK))
        await asyncio.sleep(0.02)
        await rollout.capture.confirm(completed.id)
        return completed.id

    ids = await asyncio.gather(*map(call, range(4)))
    outcome = await finished(rollout)
    assert (len(set(ids)), outcome.metrics.turns) == (4, 4)
    assert outcome.capture is not None
    assert outcome.capture.replayed == 0


async def test_a_delivered_answer_that_leads_nowhere_does_not_train(new_world: type[RuntimeHarness]) -> None:
    rollout = new_world(Elsewhere()).start(Say("8"), Say("9"), Say("10"))
    await called(rollout, ASK)
    sibling = await called(rollout, ASK)
    assert sibling["content"] == "9"
    await called(rollout, ASK, sibling, GO)
    outcome = await finished(rollout)
    assert records(rollout, Masked) == [Masked(1, "abandoned")]
    assert contents(outcome, "assistant") == ["9", "10"]
    assert [any(span.trains for span in segment.spans) for segment in outcome.segments] == [False, True]


async def test_a_declared_call_beside_the_task_does_not_train(new_world: type[RuntimeHarness]) -> None:
    rollout = new_world(Elsewhere()).start(Say("A title"), Say("8"))
    await called(rollout, OTHER, auxiliary=True)
    await called(rollout, ASK)
    outcome = await finished(rollout)
    assert contents(outcome, "assistant") == ["8"]
    kinds = {segment.origin.kind: segment.role for segment in outcome.segments}
    assert (kinds[SegmentKind.MAIN].trainable, kinds[SegmentKind.SUBAGENT].trainable) == (True, False)
    assert outcome.capture is not None
    assert outcome.capture.auxiliary == 1


async def test_the_main_conversation_is_chosen_at_the_end(new_world: type[RuntimeHarness]) -> None:
    """An undeclared title call came first. The reward sees the conversation that went on."""
    judged: list[object] = []

    class Judging(Elsewhere):
        async def reward(self, run: Run) -> float:
            judged.extend(message["content"] for message in run.messages)
            return 1.0

    rollout = new_world(Judging()).start(Say("A title"), Say("8"), Say("9"))
    await called(rollout, OTHER)
    first = await called(rollout, ASK)
    await called(rollout, ASK, first, GO)
    outcome = await finished(rollout)
    assert contents(outcome, "assistant") == ["8", "9"]
    assert judged == ["5 + 3?", "8", "Go on.", "9"]


async def test_a_limit_ends_the_calls_and_the_rollout(new_world: type[RuntimeHarness]) -> None:
    rollout = new_world(Elsewhere()).start(Say("8", seconds=1), limits=Limits(turns=1))
    slow = await begun(rollout, user("Slow?"))
    with pytest.raises(RolloutOver):
        await called(rollout, ASK)
    with pytest.raises(RolloutOver):  # although it was sampled before the limit was met
        await slow
    outcome = await outcome_of(rollout)
    assert outcome.end == Stop("max_turns")
    with pytest.raises(RolloutOver):
        await called(rollout, ASK)
    with pytest.raises(RolloutOver):
        await rollout.capture.finish(DONE)


@pytest.mark.parametrize("how", ["cancel", "drain", "time"])
async def test_the_end_of_the_rollout_ends_its_calls(new_world: type[RuntimeHarness], how: str) -> None:
    world = new_world(Elsewhere())
    rollout = world.start(Say("8"), Say(seconds=FOREVER), limits=Limits(seconds=100.0))
    first = await called(rollout, ASK)
    before = asyncio.all_tasks()
    waiting = [await begun(rollout, ASK, first, GO), await begun(rollout, OTHER)]
    if how == "cancel":
        world.roster.cancel(Selection(ME, rollout_ids=("r1",)), "enough")
    elif how == "drain":
        await world.roster.drain(1)
    for task in waiting:
        with pytest.raises(RolloutOver):
            await task
    outcome = await outcome_of(rollout)
    assert isinstance(outcome.end, Cancellation if how == "cancel" else Failure)
    assert [settled.segment_id for settled in records(rollout, CaptureSettled)] == ["0"]
    await asyncio.sleep(1)
    assert {task for task in asyncio.all_tasks() - before if not task.done()} == set()


async def test_masks_are_settled_also_at_the_time_limit(new_world: type[RuntimeHarness]) -> None:
    """The samples of a rollout that met its time limit train."""
    rollout = new_world(Elsewhere()).start(Say("8"), Say("9"), Say("10"), limits=Limits(seconds=100.0))
    await called(rollout, ASK)
    sibling = await called(rollout, ASK)
    await called(rollout, ASK, sibling, GO)
    outcome = await outcome_of(rollout)
    assert isinstance(outcome.end, Failure)
    assert outcome.end.failure_class is FailureClass.DEADLINE
    assert records(rollout, Masked) == [Masked(1, "abandoned")]


async def test_a_failing_trainer_ends_the_rollout_as_in_play(new_world: type[RuntimeHarness]) -> None:
    failure = Failure(Category.NETWORK, "gone", 1)
    rollout = new_world(Elsewhere()).start(Say(failure=failure))
    with pytest.raises(RolloutOver):
        await called(rollout, ASK)
    assert (await outcome_of(rollout)).end == failure


async def test_a_bug_of_the_server_ends_the_rollout_and_reveals_nothing(new_world: type[RuntimeHarness]) -> None:
    rollout = new_world(Elsewhere()).start(Say(error=LookupError("postgres://user:hunter2@db")))
    with pytest.raises(RolloutOver):
        await called(rollout, ASK)
    assert_internal(await outcome_of(rollout))


async def test_a_malformed_completion_ends_the_rollout_in_the_trainers_name(new_world: type[RuntimeHarness]) -> None:
    rollout = new_world(Elsewhere()).start(Say(message='{"role": "assistant", "content": 5}'))
    with pytest.raises(RolloutOver):
        await called(rollout, ASK)
    end = (await outcome_of(rollout)).end
    assert isinstance(end, Failure)
    assert (end.category, end.failure_class) == (Category.VALIDATION, FailureClass.TRAINER)
    assert "malformed" in end.message


async def test_more_calls_than_allowed_are_refused_and_the_others_go_on(new_world: type[RuntimeHarness]) -> None:
    rollout = new_world(Elsewhere()).start(Say("8", seconds=60))
    tasks = [await begun(rollout, user(f"{number}?")) for number in range(MOST_CALLS)][:MOST_CALLS]
    with pytest.raises(Busy) as busy:
        await called(rollout, ASK)
    assert (busy.value.reason, busy.value.retry_after) == ("TOO_MANY_CALLS", 1.0)
    assert len({completed.id for completed in await asyncio.gather(*tasks)}) == MOST_CALLS
    await called(rollout, ASK)
    assert (await finished(rollout)).metrics.turns == MOST_CALLS + 1


async def test_calls_wait_for_the_agent_to_begin(new_world: type[RuntimeHarness]) -> None:
    class Preparing(Elsewhere):
        async def setup(self, run: Run) -> None:
            await asyncio.sleep(10)

    rollout = new_world(Preparing()).start(Say("8"))
    early = [asyncio.create_task(called(rollout, user(f"{number}?"))) for number in range(MOST_CALLS)]
    await asyncio.sleep(1)
    with pytest.raises(Busy):
        await called(rollout, ASK)
    assert [message["content"] for message in await asyncio.gather(*early)] == ["8"] * MOST_CALLS
    await finished(rollout)


async def test_calls_that_wait_learn_that_the_rollout_never_began(new_world: type[RuntimeHarness]) -> None:
    class Failing(Elsewhere):
        async def setup(self, run: Run) -> None:
            await asyncio.sleep(10)
            raise LookupError

    class Plain(Agent):
        name = "plain"

    world = new_world(Failing(), Plain())
    for agent in ("elsewhere", "plain"):
        rollout = world.start(Say("8", seconds=10), agent=agent)
        with pytest.raises(RolloutOver):
            await called(rollout, ASK)
        with pytest.raises(RolloutOver):
            await called(rollout, ASK)
        await outcome_of(rollout)


async def test_finishing_again_says_so_and_another_result_is_refused(new_world: type[RuntimeHarness]) -> None:
    rollout = new_world(Elsewhere()).start()
    assert await rollout.capture.finish(DONE) is False
    with pytest.raises(RolloutOver):
        await called(rollout, ASK)
    for _ in range(2):
        assert await rollout.capture.finish(FinishedWork(RewardResult(0.5, {"tests": 1.0}))) is True
        with pytest.raises(AlreadyFinished):
            await rollout.capture.finish(FinishedWork())
        outcome = await outcome_of(rollout)
    assert outcome.reward_result.reward == 0.5
    assert outcome.capture is not None


async def test_an_agent_that_failed_ends_its_rollout_in_its_class(new_world: type[RuntimeHarness]) -> None:
    rollout = new_world(Elsewhere()).start(Say("8"))
    await called(rollout, ASK)
    failure = Failure(Category.INTERNAL, "the sandbox broke", 1, source=FailureClass.ENVIRONMENT)
    assert (await finished(rollout, FinishedWork(failure=failure))).end == failure


async def test_a_failure_that_an_agent_reports_is_logged_without_frames_of_this_package(
    new_world: type[RuntimeHarness], caplog: pytest.LogCaptureFixture
) -> None:
    rollout = new_world(ExternalAgent(name="far")).start(Say("8"))
    await called(rollout, ASK)
    await finished(rollout, FinishedWork(failure=Failure(Category.INTERNAL, "the sandbox broke", 1)))
    (logged,) = (record for record in caplog.records if "failed" in record.getMessage())
    assert logged.getMessage() == "agent far: play() failed: the sandbox broke"
    assert logged.exc_info is None


async def test_an_agent_that_goes_silent_ends(new_world: type[RuntimeHarness]) -> None:
    """A call that takes longer than the idle time is no silence."""
    rollout = new_world(Elsewhere(idle_seconds=60.0)).start(Say("8", seconds=200))
    loop = asyncio.get_running_loop()
    await called(rollout, ASK)
    quiet = loop.time()
    outcome = await outcome_of(rollout)
    assert isinstance(outcome.end, Failure)
    assert outcome.end.failure_class is FailureClass.ENVIRONMENT
    assert "for 60 s" in outcome.end.message
    assert 60 <= loop.time() - quiet < 61  # virtual seconds
    assert contents(outcome, "assistant") == ["8"]


async def test_a_prompt_that_is_too_long_is_refused_and_a_shorter_one_goes_on(new_world: type[RuntimeHarness]) -> None:
    failure = Failure(Category.VALIDATION, "too long", 2, source=FailureClass.POLICY)
    too_long = PromptTooLong(failure, 5000, 4096)
    rollout = new_world(Elsewhere()).start(Say("8"), Say(error=too_long), Say("9"), Say("10"))
    first = await called(rollout, ASK)
    with pytest.raises(CallRefused) as refused:
        await called(rollout, ASK, first, user("x" * 10_000))
    reason = refused.value.reason, refused.value.tokens, refused.value.maximum
    assert reason == ("CONTEXT_LENGTH_EXCEEDED", 5000, 4096)
    second = await called(rollout, ASK, first, GO)
    await called(rollout, ASK, first, GO, second, GO)
    outcome = await finished(rollout)
    assert contents(outcome, "assistant") == ["8", "9", "10"]
    assert outcome.capture is not None
    assert outcome.capture.refused == 1


async def test_ever_other_tools_do_not_fill_the_memory(
    new_world: type[RuntimeHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offered_tools, "MOST_TOOL_TEXT", 2500)
    rollout = new_world(Elsewhere()).start(Say("8"), Say("9"), Say("10"))
    tools = [ClientTool(f"tool {number}", "x" * 1000, "{}") for number in range(3)]
    first = await called(rollout, ASK, tools=tools[:1])
    await called(rollout, ASK, tools=tools[1:2])
    with pytest.raises(CallRefused) as refused:
        await called(rollout, ASK, tools=tools[2:])
    assert (refused.value.reason, refused.value.field) == ("INVALID_CALL", "tools")
    await called(rollout, ASK, first, GO, tools=tools[:1])
    outcome = await finished(rollout)
    assert contents(outcome, "assistant") == ["8", "10"]
    assert len(outcome.segments) == 2


async def test_a_first_prompt_that_is_too_long_leaves_a_main_conversation(new_world: type[RuntimeHarness]) -> None:
    failure = Failure(Category.VALIDATION, "too long", 1, source=FailureClass.POLICY)
    rollout = new_world(Elsewhere()).start(Say(error=PromptTooLong(failure)), Say("9"))
    with pytest.raises(CallRefused, match="too long"):
        await called(rollout, user("x" * 10_000))
    await called(rollout, ASK)
    assert contents(await finished(rollout), "assistant") == ["9"]


async def test_a_call_whose_caller_left_before_it_failed_is_sampled_anew(new_world: type[RuntimeHarness]) -> None:
    failure = Failure(Category.VALIDATION, "too long", 1, source=FailureClass.POLICY)
    rollout = new_world(Elsewhere()).start(Say(error=PromptTooLong(failure), seconds=10), Say("9"))
    lost = await begun(rollout, ASK)
    lost.cancel()
    await asyncio.sleep(20)
    assert (await called(rollout, ASK))["content"] == "9"
    assert contents(await finished(rollout), "assistant") == ["9"]


class OneConversation(Script):
    """A sampler that supports a single conversation, as a trainer of the synchronous HTTP API does."""

    def fork(self, fork: Fork) -> Script:
        if fork.origin.kind is SegmentKind.MAIN and fork.tools is None:
            return self
        text = "this trainer supports one conversation"
        raise RolloutFailed(Failure(Category.VALIDATION, text, source=FailureClass.ENVIRONMENT))


async def test_a_second_conversation_that_the_trainer_cannot_have_is_refused(
    new_world: type[RuntimeHarness],
) -> None:
    world = new_world(Elsewhere())
    world.new_script = OneConversation
    rollout = world.start(Say("8"), Say("9"))
    first = await called(rollout, ASK)
    for other in (called(rollout, OTHER), called(rollout, user("Rewritten."), first, GO)):
        with pytest.raises(CallRefused) as refused:
            await other
        assert refused.value.reason == "ONE_CONVERSATION"
        assert "one conversation" in refused.value.message
    await called(rollout, ASK, first, GO)
    outcome = await finished(rollout)
    assert contents(outcome, "assistant") == ["8", "9"]
    assert outcome.capture is not None
    assert outcome.capture.refused == 2
    assert len(outcome.segments) == 1


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([{"role": "nobody", "content": "x"}], "messages[0].role"),
        ([ASK, {"role": "user", "content": [{"type": "video"}]}], "messages[1].content[0].type"),
    ],
)
async def test_an_invalid_call_names_its_field_and_changes_nothing(
    new_world: type[RuntimeHarness], messages: list[Fields], field: str
) -> None:
    rollout = new_world(Elsewhere()).start(Say("8"))
    with pytest.raises(CallRefused) as refused:
        await called(rollout, *messages)
    assert (refused.value.reason, refused.value.field) == ("INVALID_CALL", field)
    await called(rollout, ASK)
    outcome = await finished(rollout)
    assert len(outcome.segments) == 1
    assert outcome.capture is not None
    assert outcome.capture.refused == 1


async def test_unknown_completions_are_not_confirmed(new_world: type[RuntimeHarness]) -> None:
    rollout = new_world(Elsewhere()).start(Say("8"))
    with pytest.raises(NotFound):
        await rollout.capture.confirm("0" * 32)
    await finished(rollout)


async def test_the_last_answer_may_be_confirmed_after_the_agent_has_finished(new_world: type[RuntimeHarness]) -> None:
    rollout = new_world(Elsewhere()).start(Say("8"))
    completed = await rollout.capture.call(model_call(ASK))
    await rollout.capture.finish(DONE)
    await rollout.capture.confirm(completed.id)
    await outcome_of(rollout)
    with pytest.raises(RolloutOver):
        await rollout.capture.confirm(completed.id)


async def test_completions_under_way_are_given_up_when_the_agent_is_done(new_world: type[RuntimeHarness]) -> None:
    """Also that of the main conversation: the program has ended, so nobody waits for it."""
    rollout = new_world(Elsewhere()).start(Say("8"), Say(seconds=FOREVER))
    first = await called(rollout, ASK)
    waiting = [await begun(rollout, ASK, first, GO), await begun(rollout, OTHER)]
    outcome = await finished(rollout)
    assert outcome.end == Stop("stop")
    assert [message.fields()["content"] for message in outcome.messages] == ["5 + 3?", "8", "Go on."]
    for task in waiting:
        with pytest.raises(RolloutOver):
            await task


async def test_an_endpoint_is_opened_once_and_before_the_first_completion(new_world: type[RuntimeHarness]) -> None:
    mistakes: list[str] = []

    class Twice(Agent):
        name = "twice"

        async def play(self, run: Run) -> None:
            async with run.capture() as capture:
                assert capture.access.base_url == f"/r/{run.uid}"
            for _ in range(2):
                with pytest.raises(AgentMistake) as mistake:
                    async with run.capture():
                        pass
                mistakes.append(str(mistake.value))
                await run.sample()

    outcome = await outcome_of(new_world(Twice()).start(Say("8")))
    assert outcome.end == Stop("stop")
    assert [text.split(":")[0] for text in mistakes] == ["capture"] * 2


async def test_the_rollouts_sampling_wins_and_says_so_once(new_world: type[RuntimeHarness]) -> None:
    world = new_world(Elsewhere())
    rollout = world.start(Say("8"), sampling=Sampling(temperature=1.0, max_tokens=100))
    asked: Mapping[str, Any] = {"temperature": 0.0, "top_p": 0.5, "max_tokens": 32_000, "stop": ("END",)}
    first = await called(rollout, ASK, sampling=asked)
    await called(rollout, ASK, first, GO, sampling=asked)
    await finished(rollout)
    used = [request.sampling for request in world.script(rollout).asks]
    assert used == [Sampling(temperature=1.0, top_p=0.5, max_tokens=100, stop=("END",))] * 2
    assert [note.code for note in records(rollout, Note)] == ["sampling_overridden"]


async def test_a_hundred_rollouts_at_once_keep_their_calls_apart(new_world: type[RuntimeHarness]) -> None:
    world = new_world(Elsewhere())
    rollouts = [world.start(Say(f"first {n}", seconds=1), Say(f"second {n}", seconds=1)) for n in range(100)]

    async def played(rollout: Rollout, number: int) -> None:
        first = await called(rollout, user(f"{number}?"))
        await called(rollout, user(f"{number}?"), first, GO)
        outcome = await finished(rollout)
        assert contents(outcome, "assistant") == [f"first {number}", f"second {number}"]

    await asyncio.gather(*(played(rollout, number) for number, rollout in enumerate(rollouts)))
    assert all(len(records(rollout, Asked)) == 2 and check_log(rollout) for rollout in rollouts)
