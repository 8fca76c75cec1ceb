"""What an agent's `play` holds: the only way in which it samples, calls tools and adds to the conversation (D2)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from random import Random
from typing import Any, Literal, NoReturn, TypeVar, Unpack, cast

from rollout_server.core.conversation import Conversation, State
from rollout_server.core.ledger import SegmentKind
from rollout_server.core.machine import LimitReached
from rollout_server.core.message import JSON, ToolCall
from rollout_server.core.outcome import Category, End, Failure, Metrics, RewardResult, Stop
from rollout_server.core.record import Appended, GivenUp, Masked, Note
from rollout_server.core.spec import DriftPolicy
from rollout_server.runtime.agent_protocol import Request
from rollout_server.runtime.errors import AgentMistake, RolloutEnded, RolloutFailed
from rollout_server.runtime.ports import CompletionRequest, Fork, Sampler, Tool
from rollout_server.runtime.rollout import RolloutEnding
from rollout_server.runtime.run.arguments import (
    SamplingOptions,
    check_room,
    checked_note,
    checked_reason,
    fork_kind,
    forkable_tools,
    turn_sampling,
)
from rollout_server.runtime.run.context import RunContext
from rollout_server.runtime.run.messages import Reply, checked_messages, drift_failure, read_only
from rollout_server.runtime.run.recorded_effects import T, now, once, random
from rollout_server.runtime.run.tool_calls import checked_calls, run_calls
from rollout_server.runtime.tools.executor import ToolExecutor, ToolResult

R = TypeVar("R")


class Run:
    """One conversation of a rollout, as its agent sees it; nearly always the only one."""

    def __init__(
        self, context: RunContext, conversation: Conversation, sampler: Sampler, executor: ToolExecutor
    ) -> None:
        self._context = context
        self._rollout = context.rollout
        self._machine = context.machine
        self._conversation = conversation
        self._sampler = sampler
        self._executor = executor
        self._successor: Run | None = None
        self._random: Random | None = None

    @property
    def ending(self) -> RolloutEnding:
        """Whether the rollout is ending, and how."""
        return self._rollout.ending

    @property
    def uid(self) -> str:
        """The server's id of the rollout."""
        return self._rollout.uid

    @property
    def rollout_id(self) -> str:
        """The caller's id of the rollout."""
        return self._rollout.spec.rollout_id

    @property
    def turn(self) -> int:
        """Completions asked for so far, in all conversations of the rollout."""
        return self._machine.turn

    @property
    def request(self) -> Request:
        """What the rollout was asked to be, with the limits in force."""
        return Request(self._rollout.spec)

    @property
    def metadata(self) -> Mapping[str, JSON]:
        """What the request says beside the conversation."""
        return self.request.metadata

    @property
    def used(self) -> Metrics:
        """What the rollout has used so far, in all of its conversations: turns, tokens, tool calls, milliseconds."""
        return self._machine.metrics

    @property
    def tools(self) -> Sequence[Tool]:
        """What the model is told in this conversation, and may call."""
        return self._executor.tools

    @property
    def state(self) -> dict[str, Any]:
        """What the agent keeps of this rollout, in all of its conversations and for its reward. Nobody else looks at it."""
        return self._context.state

    @property
    def messages(self) -> Sequence[Mapping[str, JSON]]:
        """The conversation so far, parsed. It is for reading: `AgentMistake` for whoever changes it."""
        return cast(
            "Sequence[Mapping[str, JSON]]", read_only([message.fields() for message in self._conversation.messages])
        )

    @property
    def cancelled(self) -> bool:
        """Somebody wants the rollout to end. Plain functions in threads may look at it."""
        return self.ending.is_requested

    async def sample(self, **sampling: Unpack[SamplingOptions]) -> Reply:
        """Asks the model for the next message: `await run.sample()`, or `await run.sample(temperature=0.2, max_tokens=64)`.

        The options hold for this turn; the rest is as the request says. Raises `RolloutEnded` when a limit is met or the trainer
        fails, and `AgentMistake` naming an option that is none or has a wrong value.
        """
        conversation, spec = self._conversation, self._rollout.spec
        own = turn_sampling(spec.sampling, sampling, spec.completions.dialect) if sampling else spec.sampling
        await self._context.check(conversation)
        asked = self._machine.request_completion(conversation, None if own == spec.sampling else own)
        if isinstance(asked, LimitReached):
            self._context.end(asked.stop)
        rollout, note = self._rollout, partial(self._note, asked.turn)
        last = conversation.last_completion, conversation.turn_messages, conversation.line
        request = CompletionRequest(
            asked, conversation.messages, *last, rollout.deadline, rollout.credentials, note, own
        )
        self._context.record(asked)
        try:
            with self._context.waiting():
                answered = await self._sampler.sample(request)
        except RolloutFailed as failed:
            self._context.end(failed.failure)
        except asyncio.CancelledError:
            self._abandon_turn(asked.turn)
            raise
        logged = self._context.record(answered)
        drift = drift_failure(logged) if spec.on_drift is DriftPolicy.FAIL else None
        if drift is not None:
            self._context.end(drift)
        try:
            return Reply.of(answered)
        except RolloutFailed as failed:
            self._context.end(failed.failure)

    async def call(self, calls: Iterable[ToolCall]) -> Sequence[ToolResult]:
        """Runs tool calls at the same time and appends their results in the calls' order.

        Raises `RolloutEnded` when a limit is met. A tool that fails answers the model, and so does one that the agent stops
        waiting for. Raises `AgentMistake` for a call that the model has not made, or that has its result.
        """
        await self._context.check(self._conversation)
        started = self._machine.start_calls(checked_calls(calls, self._conversation), self._conversation)
        if isinstance(started, LimitReached):
            self._context.end(started.stop)
        return await run_calls(self._context, self._executor, started)

    async def append(self, *messages: Mapping[str, JSON]) -> None:
        """Adds messages to the conversation. They do not train.

        Raises `AgentMistake` for what are no messages, and for more than a rollout may hold.
        """
        await self._check_growth("append")
        added = checked_messages(messages)
        if added:
            self._context.record(Appended(added, self._conversation.id))

    async def fork(
        self,
        messages: Sequence[Mapping[str, JSON]] | None = None,
        *,
        kind: Literal["branch", "subagent", "compaction"] | None = None,
        tools: Sequence[Tool] | None = None,
    ) -> Run:
        """Opens another conversation, which becomes a training sample of its own. Several may be under way at the same time.

        Limits, metrics and the end are the rollout's: what one conversation uses is missing to the others.

        Args:
            messages: what the conversation begins with; None for a branch.
            kind: "branch": a second continuation of this conversation as it is now, whose tokens so far do not train again.
                "subagent": a conversation of its own, such as a part of the work given to somebody else. "compaction": a shorter
                context in place of this conversation, which is closed. Without it, a branch where there are no messages, else
                a subagent.
            tools: what the model is told in the conversation, and may call; None: the same as here. A branch has the same.

        Raises:
            RolloutOver: also where the rollout's trainer cannot tell conversations apart.
            AgentMistake: for arguments that do not fit together, or while a turn of this conversation is under way
                (a subagent may be opened then).
        """
        opens = fork_kind(kind, None if messages is None else len(messages), has_tools=tools is not None)
        apart = opens is SegmentKind.SUBAGENT
        await self._check_growth("fork", *((State.OPEN, State.ASKING, State.CALLING) if apart else ()))
        given = None if tools is None else forkable_tools(tools)
        forked = self._machine.fork(opens, checked_messages(messages or ()), self._conversation)
        offered = self._executor.tools if given is None else given
        try:
            sampler = self._sampler.fork(Fork(forked.origin, given))
        except RolloutFailed as failed:
            self._context.end(failed.failure)
        self._context.record(replace(forked, tools=tuple(tool.name for tool in offered)))
        executor = self._executor if given is None else self._executor.with_tools(given)
        run = Run(self._context, self._machine.find(forked), sampler, executor)
        if opens is SegmentKind.COMPACTION:
            self._successor = run
        return run

    def mask(self, reply: Reply, reason: str) -> None:
        """Takes an answer out of the training: its tokens stay in the sample, masked. Nothing puts it back.

        `reason` is for whoever looks at the rollout. Also for rewards. Raises `AgentMistake` for what is no answer of the rollout.
        """
        if not isinstance(reply, Reply):
            raise AgentMistake(f"mask: {reply!r:.100} is no answer; `run.sample()` returns them")
        if not self._machine.has_completed(reply.turn):
            raise AgentMistake(f"mask: the rollout has no answer of turn {reply.turn}")
        self._context.record(Masked(reply.turn, checked_reason(reason, "mask")))

    def now(self) -> datetime:
        """The time, in UTC. A replayed rollout is told the same."""
        return now(self._context, self._conversation)

    def random(self) -> Random:
        """A random generator of the conversation, always the same one. Its seed is recorded: a replay draws the same."""
        if self._random is None:
            self._random = random(self._context, self._conversation)
        return self._random

    async def once(self, function: Callable[[], T | Awaitable[T]]) -> T:
        """Calls a function whose effect is wanted once: its result is recorded, and a replay is given it without a call.

        A plain function runs in a thread. The result must be what JSON can hold, and comes back as it reads from JSON; what the
        function raises is not recorded.
        """
        return await once(self._context, self._conversation, function)

    def wait(self, work: Coroutine[Any, Any, R]) -> R:
        """What `await` is elsewhere, for a plain `play` or `reward`, which runs in a thread: `run.wait(run.sample())`.

        Raises what `work` raises, and `AgentMistake` for what is no coroutine, or on the event loop.
        """
        if not isinstance(work, Coroutine):
            raise AgentMistake(f"run.wait takes what an `async def` returns, such as run.sample(), not {work!r:.100}")
        return self._context.wait(work)

    def note(self, code: str, text: str) -> None:
        """Leaves a remark that watchers see. Raises `AgentMistake` for what are no texts."""
        self._note(self._conversation.turn, *checked_note(code, text))

    async def finish(self, reason: str = "stop") -> NoReturn:
        """Ends the rollout with a word of the agent's own. Raises `AgentMistake` for what is none."""
        await self._context.check(self._conversation)
        stop = self._machine.natural_stop()
        self._context.end(Stop(checked_reason(reason, "finish"), stop.truncated))

    def close(self, end: End, reward: RewardResult | None = None) -> None:
        """From now on nothing can be asked for, not even by a reward. `reward` is that of a failure, for which none is computed."""
        self.ending.reach(end, reward)

    @property
    def latest(self) -> Run:
        """The run that goes on with this one's conversation: itself, or what compactions put in its place."""
        run = self
        while run._successor is not None:
            run = run._successor
        return run

    @property
    def under_way(self) -> Sequence[asyncio.Task[object]]:
        """The tasks that wait for answers or tools."""
        return self._context.under_way

    async def run_in_thread(self, name: str, function: Callable[[], R]) -> R:
        """Runs a plain function of the agent's in a thread, and leaves that alone where nobody waits any more."""
        return await self._context.run_in_thread(name, function)

    def _abandon_turn(self, turn: int) -> None:
        """The agent stopped waiting for an answer. The trainer may count it, so that the next turn would not fit."""
        if self.ending.is_requested or self.ending.is_reached:
            return
        if self._conversation is not self._machine.main:
            self._context.record(GivenUp(turn, self._conversation.id))
            return
        text = (
            f"turn {turn}: the agent stopped waiting for the trainer's answer. The turn may have been generated, so the rollout "
            "cannot go on without it"
        )
        self.ending.reach(Failure(Category.INTERNAL, text, turn))

    async def _check_growth(self, of: str, *states: State) -> None:
        await asyncio.sleep(0)  # whoever does nothing else must not hold the event loop
        await self._context.check(self._conversation, *states)
        check_room(self._machine, self._conversation, of)

    def _note(self, turn: int, code: str, text: str) -> None:
        with suppress(RolloutEnded):
            self._context.record(Note(turn, code, text))
