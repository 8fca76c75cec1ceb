"""In any schedule of clients that share an endpoint, each call gets a completion of its own messages, which trains at most once."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_server.core.capture.call import Completed
from rollout_server.core.error import CallRefused, RolloutOver
from rollout_server.core.ledger import Author, Prediction, pack_tokens
from rollout_server.core.limits import Limits
from rollout_server.core.message import Message
from rollout_server.core.outcome import Category, Failure, FailureClass
from rollout_server.core.record import Answered, CaptureSettled
from rollout_server.runtime.capture.endpoint import FinishedWork
from rollout_server.runtime.errors import PromptTooLong
from rollout_server.runtime.ports import CompletionRequest
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.rollout import Rollout

from tests.support.captured_agents import Elsewhere, Fields, message_of, model_call, user
from tests.support.jumping_loop import JumpingLoop
from tests.support.runtime_harness import ME, RuntimeHarness, Script, check_log, outcome_of


@dataclass(frozen=True)
class Act:
    """What a client does next.

    Args:
        what: "go on" with its history, "edit" it (leave its last exchange out and ask something else), ask "again", or ask
            something "new".
        leaves: seconds after which it disconnects and asks again; None: it waits.
        confirms: whether it confirms the completion that it gets.
        pause: seconds before its next act.
    """

    what: str
    leaves: float | None
    confirms: bool
    pause: float


acts = st.builds(
    Act,
    what=st.sampled_from(("go on", "go on", "go on", "edit", "again", "new")),
    leaves=st.sampled_from((None, None, 0.0, 0.5, 3.0)),
    confirms=st.booleans(),
    pause=st.sampled_from((0.0, 0.0, 0.5, 2.0)),
)
clients = st.lists(st.lists(acts, min_size=1, max_size=6), min_size=1, max_size=4)
delays = st.lists(st.sampled_from((0.0, 0.5, 1.0, 4.0, -1.0)), min_size=1, max_size=6)
ends = st.sampled_from(("finish", "finish", "cancel", "limit"))


class Numbered(Script):
    """A sampler whose completions have texts and tokens of their own. A negative delay is a prompt that is too long."""

    delays: list[float]

    async def sample(self, ask: CompletionRequest) -> Answered:
        self.asks.append(ask)
        turn = ask.asked.turn
        delay = self.delays[turn % len(self.delays)]
        await asyncio.sleep(abs(delay))
        if delay < 0:
            raise PromptTooLong(Failure(Category.VALIDATION, "too long", turn, source=FailureClass.POLICY))
        message = Message.write({"role": "assistant", "content": f"Answer {turn}."})
        prompt = Prediction(pack_tokens(), pack_tokens([turn]))
        return Answered(turn, message, "stop", pack_tokens([1000 * turn, 1000 * turn + 1]), predicted=prompt)


@dataclass
class Schedule:
    """The clients of one rollout, and what they got: each completion with the messages of the call that got it."""

    rollout: Rollout
    got: list[tuple[list[Fields], Completed]] = field(default_factory=list)
    refusals: set[str] = field(default_factory=set)

    async def client(self, number: int, acts: list[Act]) -> None:
        begin = [user(f"Begin {number % 2}.")]
        history = list(begin)
        for index, act in enumerate(acts):
            if act.what == "new":
                history = [user(f"New {number % 2}.")]
            elif act.what == "edit" and len(history) > 2:
                history = [*history[:-2], user(f"Edit {index}.")]
            completed = await self.asked(history, act)
            if completed is None:
                return
            if act.what != "again":
                history = [*history, message_of(completed), user(f"Go on {index}.")]
            await asyncio.sleep(act.pause)

    async def asked(self, history: list[Fields], act: Act) -> Completed | None:
        """Call until there is a completion; None once the rollout is over, or the prompt was too long three times."""
        endpoint = self.rollout.capture
        for _ in range(3):
            try:
                if act.leaves is not None:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(act.leaves):
                            await endpoint.call(model_call(*history))
                completed = await endpoint.call(model_call(*history))
                self.got.append((history, completed))
                if act.confirms:
                    await endpoint.confirm(completed.id)
                return completed
            except RolloutOver:
                return None
            except CallRefused as refused:
                self.refusals.add(refused.reason)
        return None


def check(rollout: Rollout, script: Script, got: list[tuple[list[Fields], Completed]]) -> None:
    """Assert what holds at the end of every schedule."""
    outcome = check_log(rollout)
    answered = [entry.record for entry in rollout.log.entries if isinstance(entry.record, Answered)]
    prompts = {ask.asked.turn: ask.messages[: ask.asked.messages] for ask in script.asks}
    for history, completed in got:
        prompt = [message.fields()["content"] for message in prompts[completed.turn]]
        assert prompt == [message["content"] for message in history]
        assert message_of(completed)["content"] == f"Answer {completed.turn}."
    assert len({(completed.id, completed.turn) for _, completed in got}) == len({c.turn for _, c in got})
    sampled, trained = Counter[int](), Counter[int]()
    for segment in outcome.segments:
        for span in segment.spans:
            if span.author is Author.MODEL:
                sampled.update(segment.ids(span.start, span.stop))
            if span.trains:
                trained.update(segment.ids(span.start, span.stop))
    assert sampled == Counter(token for record in answered for token in record.token_ids or ())
    assert set(trained) <= set(sampled)
    assert outcome.capture is not None
    assert sum(isinstance(entry.record, CaptureSettled) for entry in rollout.log.entries) == 1


@settings(max_examples=100, deadline=None)
@given(clients, delays, ends)
def test_any_schedule(clients: list[list[Act]], delays: list[float], end: str) -> None:
    async def run() -> None:
        world = RuntimeHarness(Elsewhere())
        world.new_script = type("Paced", (Numbered,), {"delays": delays})
        rollout = world.start(limits=Limits(turns=5 if end == "limit" else 1000, seconds=10_000.0))
        schedule = Schedule(rollout)
        playing = [asyncio.create_task(schedule.client(number, acts)) for number, acts in enumerate(clients)]
        if end == "cancel":
            await asyncio.sleep(2.5)
            world.roster.cancel(Selection(ME), "enough")
        await asyncio.gather(*playing)
        if end != "cancel":
            with suppress(RolloutOver):
                await rollout.capture.finish(FinishedWork())
        await outcome_of(rollout)
        await asyncio.sleep(10)
        assert {task for task in asyncio.all_tasks() if not task.done()} == {asyncio.current_task()}
        assert schedule.refusals <= {"CONTEXT_LENGTH_EXCEEDED"}
        check(rollout, world.script(rollout), schedule.got)
        await world.close()

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(run())
