"""Replay: after a restart, the agent of an unfinished rollout runs again from the start, over the log of the earlier process (D3).

The agent's commands are compared with the recorded ones, and get the recorded results without any side effect. Once the log is
used up, the rollout continues live.

The records are applied to the machine in their order, by a cursor. A result is applied, and handed to the task that waits for it,
when the cursor reaches it. A command stops the cursor until the agent issues it. So concurrent conversations get their results in
the recorded order. A command is compared with the next command of its conversation that was not issued yet. Conversations must
therefore issue their commands in the same order as before, each by itself. Masks and rewards are compared per turn, in any order.

Concurrent calls of `once` and of further models are recorded in the order in which they return. Those of `once` are found by the
number of the call in its conversation, and the cursor also stops where one began. Those of further models are found by what was
asked. A call that failed, or did not return, is not recorded and is made again.

A command that cannot be recorded, because a limit forbids it, has no record in the log. It then fails or ends the rollout as soon
as the records that were applied show this.

A tool that returned is not called again. What it did with the rollout itself (rewards, conversations) is applied without a command.
`replay_obstacle` finds the logs in which this cannot be told apart from what the agent did.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from rollout_server.core.machine import IllegalRecord, Machine
from rollout_server.core.outcome import Category, End, Failure, FailureClass
from rollout_server.core.record import (
    Asked,
    Forked,
    GivenUp,
    Input,
    Masked,
    ModelCalled,
    Note,
    Observed,
    Record,
    Rewarded,
    ToolReturned,
)
from rollout_server.core.segment import Segment
from rollout_server.runtime.errors import RolloutEnded
from rollout_server.runtime.replay_steps import ReplayStep, fits, number_of, read_steps, shown

_log = logging.getLogger(__name__)

STALL_SECONDS: Final = 300.0
"""How long the agent may leave out a recorded command while another of its commands waits for it."""


class AgentReplay:
    """The replay of one rollout. Lives on one event loop.

    Args:
        machine: the machine of the rollout, which has accepted the first record only.
        records: the log without its first record.
        reach: called with the failure if the agent does something else than what was recorded.
        over: called once the log is used up, with the records that the agent's commands led to meanwhile.

    Attributes:
        segments: those of the whole log, once they were needed.
    """

    segments: tuple[Segment, ...] | None = None

    def __init__(
        self,
        machine: Machine,
        records: Sequence[Record],
        reach: Callable[[End], None],
        over: Callable[[Sequence[Input]], None],
    ) -> None:
        self._machine = machine
        self._reach = reach
        self._over = over
        found = read_steps(records)
        self._steps, self._conversations = found.steps, found.conversations
        self._lanes: dict[str, deque[ReplayStep]] = {}
        self._numbered: dict[tuple[str, str, int], ReplayStep] = {}
        self._effects: dict[tuple[str, int], ReplayStep] = {}
        self._results: dict[tuple[str, int, int], ReplayStep] = {}
        for step in self._steps:
            self._sort(step)
        self._turns = {step.record.turn: step for step in self._steps if isinstance(step.record, Asked)}
        self._last_play = max((at for at, step in enumerate(self._steps) if step.by_play or step.is_result), default=-1)
        self._deferred: list[Input] = []
        self._at = 0
        self._ended = self._scheduled = False
        self._failure: Failure | None = None
        self._ending: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting = 0
        self._stalled: asyncio.TimerHandle | None = None
        self._at_stops: list[asyncio.Future[None]] = []

    @property
    def failure(self) -> Failure | None:
        """Why the rollout cannot be replayed; None as long as it can."""
        return self._failure

    @property
    def is_played(self) -> bool:
        """Whether the rest of the log has only what a reward may do, too, such as giving rewards."""
        return self._at > self._last_play

    def _sort(self, step: ReplayStep) -> None:
        match step.record:
            case ToolReturned(turn=turn, index=index, segment_id=segment_id):
                self._results[self._conversations[segment_id], turn, index] = step
            case Observed(what="once") if step.by_agent and not step.is_start:
                self._effects[step.conversation, step.record.number] = step
            case ModelCalled() | Observed(what="once") if step.by_agent:
                self._numbered[(step.conversation, *number_of(step.record))] = step
            case _ if step.by_agent:
                self._lanes.setdefault(self._lane_of(step.record), deque()).append(step)

    def has_next(self, segment_id: str) -> bool:
        """Return whether the log has a further command of a conversation, which the agent has not issued yet."""
        return bool(self._lanes.get(self._conversations.get(segment_id, "")))

    def check_used_up(self, segment_id: str, issued: str) -> None:
        """Raise `RolloutEnded` if the log has a further command of a conversation: the rollout fails. `issued`: what it got."""
        lane = self._lanes.get(self._conversations.get(segment_id, ""))
        if lane:
            raise self.diverge(issued, lane[0])

    def claim(self, draft: Input) -> ReplayStep | None:
        """Match a command with the recorded one; None if the log has no further command of its conversation.

        Raises `RolloutEnded` if the recorded one differs: the rollout fails.
        """
        lane = self._lanes.get(self._lane_of(draft))
        if not lane:
            return None
        candidates = lane if isinstance(draft, Masked | Rewarded) else (lane[0],)
        step = next((step for step in candidates if fits(draft, step.record)), None)
        if step is None:
            raise self.diverge(shown(draft), lane[0])
        lane.remove(step)
        return self._issue(step)

    def claim_call(self, what: str, segment_id: str, number: int) -> ReplayStep | None:
        """Match a call of `once` or of the model `what` by its number in the conversation; None if it has no recorded result."""
        conversation = self._conversations.get(segment_id, "")
        step = self._numbered.pop((conversation, what, number), None)
        if step is None:
            return None
        result = self._effects[conversation, number] if step.is_start else step
        result.issued = True
        self._issue(step)
        return result

    def submit(self, record: Input) -> Input:
        """Match a command that does not wait, and return it as it was recorded. Without a record it is kept for the end."""
        step: ReplayStep | None = None
        match record:
            case ToolReturned():
                step = self._claim_cancelled(record)
            case GivenUp(turn=turn) if (asked := self._turns.get(turn)) is not None and asked.result is not None:
                raise self.diverge(shown(record), asked.result)
            case Note() | ModelCalled() | Observed(what="once"):
                pass
            case _:
                step = self.claim(record)
        if step is not None:
            return step.record
        self.defer(record)
        return record

    def defer(self, record: Input) -> None:
        """Keep a record until the log is used up."""
        self._deferred.append(record)

    def _claim_cancelled(self, record: ToolReturned) -> ReplayStep | None:
        """Match the result of a tool call that the agent has cancelled."""
        step = self._results.get((self._conversations.get(record.segment_id, ""), record.turn, record.index))
        if step is None:
            return None
        if not (isinstance(step.record, ToolReturned) and step.record.cancelled):
            raise self.diverge(f"cancellation of the call {record.index} of turn {record.turn}", step)
        return self._issue(step)

    def _lane_of(self, record: Input) -> str:
        """Return the key of the commands that have an order: those of a conversation, or the masks or the rewards of a turn."""
        if isinstance(record, Masked | Rewarded):  # any conversation may issue them
            return f"{type(record).__name__} {record.turn}"
        named = record.of if isinstance(record, Forked) else getattr(record, "segment_id", "")
        return self._conversations.get(named, "")

    def _issue(self, step: ReplayStep) -> ReplayStep:
        step.issued = True
        self._apply_issued()
        self.proceed()
        return step

    def proceed(self) -> None:
        """Let the cursor go on in the next iteration of the event loop."""
        if not (self._scheduled or self._ended):
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._advance)

    def end_if_used_up(self) -> None:
        """Let the rollout continue live at once if the log is used up."""
        if not self._ended and self._failure is None and self._at == len(self._steps):
            self._end(self._deferred)

    def _advance(self) -> None:
        """Apply results up to one that a task waits for: its next command may precede what follows in the log."""
        self._scheduled = woken = False
        while not (woken or self._stops):
            woken = self._apply_next()
        self._apply_issued()
        self.end_if_used_up()
        if not self._stops:
            self.proceed()
            return
        for waiter in self._at_stops:
            if not waiter.done():
                waiter.set_result(None)
        self._at_stops.clear()

    def _apply_issued(self) -> None:
        """Apply the commands at the cursor that the agent has issued."""
        while not self._stops and self._steps[self._at].by_agent:
            self._apply_next()

    @property
    def _stops(self) -> bool:
        """Whether the cursor can apply nothing: the log is used up, or its next command was not issued yet."""
        if self._ended or self._failure is not None or self._at == len(self._steps):
            return True
        step = self._steps[self._at]
        return step.by_agent and not step.issued

    def _apply_next(self) -> bool:
        """Apply the record at the cursor. Return whether a task was waiting for it."""
        step = self._steps[self._at]
        self._at += 1
        self._restart_watch()
        try:
            step.apply(self._machine)
        except IllegalRecord:
            _log.exception("the log of rollout %s does not fit its own records", self._machine.uid)
            self._fail("the log does not fit its own records")
        return step.wake()

    def fast_forward(self) -> None:
        """Apply the rest of the log: the rollout ends, and its outcome has everything that was recorded."""
        if self._ended:
            return
        try:
            while self._at < len(self._steps):
                self._at += 1
                self._steps[self._at - 1].apply(self._machine)
        except IllegalRecord:
            _log.exception("the log of rollout %s does not fit its own records", self._machine.uid)
        self._end(())

    def _end(self, deferred: Sequence[Input]) -> None:
        self._ended = True
        if self._stalled is not None:
            self._stalled.cancel()
        try:
            self._over(deferred)
        except IllegalRecord:
            _log.exception("what the agent of rollout %s did does not fit its log", self._machine.uid)
            self._fail("what the agent did does not fit the log")
        self._release()

    def _release(self) -> None:
        if not self._ending.done():
            self._ending.set_result(None)
        for waiter in self._at_stops:
            if not waiter.done():
                waiter.set_result(None)
        for step in self._steps[self._at :]:
            step.wake()

    async def applied(self, step: ReplayStep) -> None:
        """Wait until a record is applied. Raise `RolloutEnded` if the replay has failed."""
        while not step.applied:
            await self._wait(step.waiter())
            if self._failure is not None:
                raise RolloutEnded(self._failure)

    async def result_of(self, step: ReplayStep) -> ReplayStep | None:
        """Wait for the result of a turn or of a tool call; None if the log has none, once the log is used up."""
        if step.result is None:
            await self.over()
            return None
        await self.applied(step.result)
        return step.result

    async def over(self, enough: Callable[[], bool] = lambda: False) -> None:
        """Wait until the log is used up, or `enough` returns True or raises; it is asked whenever the cursor has stopped.

        Raise `RolloutEnded` if the replay has failed.
        """
        while not (self._ending.done() or (self._stops and enough())):
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._at_stops.append(waiter)
            await self._wait(waiter)
        if self._failure is not None:
            raise RolloutEnded(self._failure)

    async def _wait(self, future: asyncio.Future[None]) -> None:
        self._waiting += 1
        self._watch()
        try:
            await future
        finally:
            self._waiting -= 1

    def _restart_watch(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        if self._waiting:
            self._watch()

    def _watch(self) -> None:
        """Fail if the cursor stands at the same command for a long time, while commands wait for it."""
        if self._stalled is not None or self._ended or self._at == len(self._steps):
            return
        step, seconds = self._steps[self._at], STALL_SECONDS
        if isinstance(step.record, ToolReturned):  # the agent lets the call run as long as before, and then cancels it
            seconds += step.record.elapsed_ms / 1000
        self._stalled = asyncio.get_running_loop().call_later(seconds, self._check_progress, step, seconds)

    def _check_progress(self, step: ReplayStep, seconds: float) -> None:
        self._stalled = None
        if not self._ended and self._failure is None and self._waiting and not step.applied:
            self.diverge(f"nothing for {seconds:g} s", step)

    def diverge(self, issued: str, step: ReplayStep) -> RolloutEnded:
        """End the rollout, because the agent did something else than what was recorded. Return what to raise.

        `issued` describes what it did, `step` is what was recorded.
        """
        place = f"in conversation {step.conversation!r}, record {step.sequence}"
        return self._fail(f"the log has {shown(step.record)} ({place}), but the agent issued {issued}")

    def refuse(self, issued: str) -> RolloutEnded:
        """End the rollout, because what the agent did cannot be replayed. Return what to raise."""
        return self._fail(f"the agent issued {issued}, which cannot be replayed")

    def _fail(self, text: str) -> RolloutEnded:
        if self._failure is None:
            turn = self._machine.turn
            text = f"the rollout cannot continue after the restart of the server: {text}"
            self._failure = Failure(Category.NOT_REPLAYABLE, text, turn, source=FailureClass.ENVIRONMENT)
            self._reach(self._failure)
            self._release()
        return RolloutEnded(self._failure)

    def failure_of_return(self, *, rewarded: bool) -> Failure | None:
        """Return the failure if the agent's `play` has returned although the log has further commands of it.

        A reward may still give rewards, mask, and use the clock, randomness, `once` and models. `rewarded`: it has returned, too.
        """
        if self._failure is None and not self._ended:
            left = [step for step in self._steps[self._at :] if step.by_agent and not step.issued]
            left = [step for step in left if not isinstance(step.record, ModelCalled)]
            missing = next((step for step in left if rewarded or step.by_play), None)
            if missing is not None:
                self.diverge("its end" if rewarded else "the end of play", missing)
        return self._failure
