"""The `Run` that an agent's `play` receives: its only way to sample, call tools and extend the conversation (D2)."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from datetime import datetime
from random import Random
from typing import Any, NoReturn, TypeVar, Unpack, cast

from rollout_server.core.capture.report import CaptureReport
from rollout_server.core.capture.rules import CaptureOptions
from rollout_server.core.conversation import Conversation, State
from rollout_server.core.ledger import SegmentKind
from rollout_server.core.machine import LimitReached
from rollout_server.core.message import JSON, ToolCall
from rollout_server.core.outcome import Category, End, Failure, FailureClass, Metrics, RewardResult, Stop
from rollout_server.core.record import (
    START,
    Appended,
    CaptureSettled,
    GivenUp,
    Masked,
    Note,
    Observed,
    Rewarded,
    ToolStarted,
)
from rollout_server.runtime.agent_protocol import Request
from rollout_server.runtime.capture.capture import Capture, open_capture
from rollout_server.runtime.capture.endpoint import FinishedWork
from rollout_server.runtime.capture.endpoint_tools import EndpointTools
from rollout_server.runtime.errors import AgentMistake, PromptRefused, RequestRefused, RolloutEnded, RolloutFailed
from rollout_server.runtime.models import ModelClient
from rollout_server.runtime.ports import Sampler, Tool
from rollout_server.runtime.programs import Programs
from rollout_server.runtime.read_only import read_only
from rollout_server.runtime.run.arguments import (
    ForkOptions,
    SamplingOptions,
    check_room,
    checked_note,
    checked_reason,
    checked_turn_reward,
    fork_kind,
    fork_role,
    forkable_tools,
)
from rollout_server.runtime.run.context import RunContext
from rollout_server.runtime.run.ending import RolloutEnding
from rollout_server.runtime.run.further_model import RolloutModel
from rollout_server.runtime.run.messages import Reply, checked_messages
from rollout_server.runtime.run.opening import Opening, RunParts, open_for_call, open_forked, turn_after
from rollout_server.runtime.run.recorded_effects import T, now, once, random
from rollout_server.runtime.run.tool_calls import call_list, checked_calls, run_calls
from rollout_server.runtime.run.turn import TurnOptions, take_turn
from rollout_server.runtime.tools.executor import ToolExecutor, ToolResult

R = TypeVar("R")


class Run:
    """One conversation of a rollout, as its agent sees it. Most rollouts have only one."""

    def __init__(
        self,
        context: RunContext,
        conversation: Conversation,
        sampler: Sampler,
        executor: ToolExecutor,
        model: RolloutModel | None = None,
    ) -> None:
        self._context = context
        self._rollout = context.rollout
        self._machine = context.machine
        self._conversation = conversation
        self._sampler = sampler
        self._executor = executor
        self._model = model
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
        """Number of completions requested so far, in all conversations of the rollout."""
        return self._machine.turn

    @property
    def request(self) -> Request:
        """The request for this rollout, with the limits in force."""
        return Request(self._rollout.spec)

    @property
    def metadata(self) -> Mapping[str, JSON]:
        """The request's metadata object."""
        return self.request.metadata

    @property
    def used(self) -> Metrics:
        """Usage of the rollout so far, over all conversations: turns, tokens, tool calls, milliseconds."""
        return self._machine.metrics

    @property
    def turn_rewards(self) -> Mapping[int, float]:
        """Rewards given so far, by turn, over all conversations. A turn without a reward is missing."""
        return {turn: math.fsum(values) for turn, values in sorted(self._machine.rewards.items())}

    @property
    def tools(self) -> Sequence[Tool]:
        """The tools offered to the model in this conversation."""
        return self._executor.tools

    @property
    def programs(self) -> Programs:
        """Runs programs on this server, in processes of their own."""
        return self._executor.programs

    @property
    def state(self) -> dict[str, Any]:
        """The agent's own data about this rollout, shared by all its methods and conversations. The server does not read it."""
        return self._context.state

    @property
    def reward(self) -> RewardResult:
        """The rollout's reward so far, for `reward_group`; without a number until the agent's `reward` has returned."""
        return self.ending.reward

    @property
    def messages(self) -> Sequence[Mapping[str, JSON]]:
        """The conversation so far, parsed and read-only: modifying it raises `AgentMistake`."""
        return cast(
            "Sequence[Mapping[str, JSON]]", read_only([message.fields() for message in self._conversation.messages])
        )

    @property
    def cancelled(self) -> bool:
        """Whether an end of the rollout was requested. Synchronous functions in threads may poll it."""
        return self.ending.is_requested

    @property
    def logger(self) -> logging.LoggerAdapter[logging.Logger]:
        """Logger `rollout_server.agent.NAME`, whose lines have the rollout's ids and turn."""
        ids = {"rollout_uid": self.uid, "rollout_id": self.rollout_id, "turn": self.turn}
        return logging.LoggerAdapter(logging.getLogger(f"rollout_server.agent.{self._rollout.agent.name}"), ids)

    async def sample(self, **sampling: Unpack[SamplingOptions]) -> Reply:
        """Request a completion: `await run.sample()`, or `await run.sample(temperature=0.2, max_tokens=64)`.

        The options apply to this turn; all other parameters are the request's, and unset in a conversation of a further model.
        Raises `RolloutEnded` when a limit is met or the trainer fails, and `AgentMistake` for an unknown option, for an invalid
        value, and once the rollout has used up its calls or tokens of a further model.
        """
        try:
            return await self._turn(sampling, self._abandon_turn)
        except RolloutFailed as failed:
            self._context.end(failed.failure)

    async def attempt(self, **sampling: Unpack[SamplingOptions]) -> Reply:
        """Request a completion as `sample` does, for an agent that owns its loop and can continue elsewhere.

        A `max_tokens` that an engine's context cannot hold is lowered. Raises `PromptRefused` if the conversation cannot be
        rendered or the engine refuses the request, and `PromptTooLong` if it exceeds the context. Then, and if this call is
        cancelled, the conversation is closed and the rollout continues, also if it is the main one. Every other failure ends the
        rollout, and so does an engine that refuses before it has completed a turn: that is how a wrong configuration looks.
        """
        try:
            return await self._turn(sampling, self._give_up, fits_context=True)
        except PromptRefused as refused:
            if isinstance(refused, RequestRefused) and not self._machine.metrics.turns:
                self._context.end(refused.failure)
            self._note(self._conversation.turn, "prompt_refused", refused.failure.message)
            self._give_up(self._conversation.turn)
            raise
        except RolloutFailed as failed:
            self._context.end(failed.failure)

    async def _turn(
        self, sampling: SamplingOptions, abandon: Callable[[int], None], *, fits_context: bool = False
    ) -> Reply:
        """Request a completion. `abandon` is called with the turn if the caller is cancelled. Raises `RolloutFailed`."""
        return await take_turn(self._parts, TurnOptions(sampling, abandon, self._note, fits_context))

    async def call(self, calls: Iterable[ToolCall]) -> Sequence[ToolResult]:
        """Run tool calls concurrently and append their results in the order of the calls.

        A tool that fails, or whose call is cancelled by the agent, returns an error text to the model. Raises `RolloutEnded`
        when a limit is met, and `AgentMistake` for a call that the model did not make or that already has its result.
        """
        wanted = call_list(calls)
        if not wanted and await self._skips():
            return []

        def ends() -> bool:
            return isinstance(self._machine.start_calls((), self._conversation), LimitReached)

        await self._context.ready(self._conversation, ends=ends)
        started = self._machine.start_calls(checked_calls(wanted, self._conversation), self._conversation)
        if isinstance(started, LimitReached):
            self._context.end(started.stop)
        started = tuple(replace(each, repeatable=self._executor.may_repeat(each.call)) for each in started)

        async def execute(intent: ToolStarted) -> ToolResult:
            return await self._executor.run(intent.call, self, intent.key)

        return await run_calls(self._context, execute, started)

    async def append(self, *messages: Mapping[str, JSON]) -> None:
        """Append messages to the conversation. Their tokens have mask 0.

        Raises `AgentMistake` for invalid messages, and if the rollout becomes too large.
        """
        if not messages and await self._skips():
            return
        await self._check_growth("append")
        added = checked_messages(messages)
        if added:
            await self._context.issue(Appended(added, self._conversation.id))

    async def fork(self, messages: Sequence[Mapping[str, JSON]] | None = None, **options: Unpack[ForkOptions]) -> Run:
        """Open another conversation, which becomes a separate training sample. Several can run concurrently.

        Limits, usage and the end belong to the rollout: all conversations share one budget.

        Args:
            messages: the initial messages of the conversation; None for a branch.
            options: see `ForkOptions`: kind, tools, role, trainable, model, after.

        Raises:
            RolloutEnded: when the rollout has ended, and if its trainer does not support several conversations. With `model`, any
                trainer does.
            AgentMistake: for arguments that do not fit together, or during a turn of this conversation (only a subagent, and a
                branch with `after`, can be opened then).
        """
        opens = fork_kind(options, None if messages is None else len(messages))
        tools, model = options.get("tools"), options.get("model")
        turn, busy = turn_after(options.get("after"), self._conversation), (State.OPEN, State.ASKING, State.CALLING)
        await self._check_growth("fork", *(State if turn else busy if opens is SegmentKind.SUBAGENT else ()))
        given = None if tools is None else forkable_tools(tools)
        part = fork_role(opens, self._conversation.role, options.get("role"), options.get("trainable"), model)
        further = None if model is None else RolloutModel(self._context, self._conversation, model)
        forked = self._machine.fork(opens, checked_messages(messages or ()), self._conversation, part, after_turn=turn)
        try:
            run = self._of(await open_forked(self._parts, forked, given, further))
        except RolloutFailed as failed:
            self._context.end(failed.failure)
        if opens is SegmentKind.COMPACTION:
            self._successor = run
        return run

    async def open(self, opening: Opening) -> Run:
        """Open a conversation for a call of an agent that owns its loop.

        MAIN returns the run that continues the main conversation. A call may part from this run's conversation whatever its state:
        opening another one never closes it.

        Raises:
            RolloutFailed: the trainer supports no further conversation, or no other tools. Nothing was recorded, and the rollout
                continues.
            RolloutEnded: when the rollout has ended.
            AgentMistake: for an opening that does not fit this conversation, and if the rollout becomes too large.
        """
        run = self._of(await open_for_call(self._parts, opening))
        if opening.kind is SegmentKind.MAIN:
            self._successor = run
        return run

    def capture(self, options: CaptureOptions = CaptureOptions()) -> AbstractAsyncContextManager[Capture]:
        """Open the model endpoint of the rollout, for an agent that owns its loop: `async with run.capture() as capture`.

        `capture.access` is what its clients need, and their calls of the model and of the tools are served until the block ends.
        Completions and tools that are under way then are given up. A rollout has one endpoint, opened before its first completion.
        Raises `AgentMistake` otherwise.
        """
        tools = EndpointTools(self._executor, self, self._context)
        return open_capture(self, self._context, options, tools)

    async def begin(self) -> None:
        """Record that the agent begins for the first time, and wait until that is stored. For `OwnLoopAgent`.

        After a restart of the server it shows that the agent may have done something, and when the time of the rollout began.
        """
        if not any(isinstance(record, Observed) and record.what == START for record in self._rollout.log.records):
            self._context.record(Observed(START, "null"))
            await self._rollout.stored()

    async def late_work(self, seconds: float) -> FinishedWork | None:
        """Wait for the result of an agent that runs elsewhere, after a limit has ended its calls. For `ExternalAgent`."""
        return await self._rollout.capture.late_work(seconds)

    def at(self, conversation: Conversation) -> Run:
        """Return a run of a conversation of an earlier process, to be read."""
        return Run(self._context, conversation, self._sampler, self._executor)

    def settle(self, main: Run, report: CaptureReport) -> None:
        """Record what the calls of an agent that owns its loop were. From now on `main` is the rollout's main conversation."""
        self._context.record(CaptureSettled(main._conversation.id, report))
        main._successor = None
        if main is not self:
            self._successor = main

    @property
    def _parts(self) -> RunParts:
        return RunParts(self._context, self._conversation, self._sampler, self._executor, self._model)

    def _of(self, parts: RunParts) -> Run:
        return Run(parts.context, parts.conversation, parts.sampler, parts.executor, parts.model)

    def mask(self, reply: Reply, reason: str) -> None:
        """Exclude a completion from training: its tokens stay in the sample with mask 0. This cannot be undone.

        `reason` is stored with the rollout. A reward may call it, too. Raises `AgentMistake` if `reply` is not a completion of
        this rollout.
        """
        if not isinstance(reply, Reply):
            raise AgentMistake(f"mask: {reply!r:.100} is not a reply; pass what `run.sample()` returned")
        if not self._machine.has_completed(reply.turn):
            raise AgentMistake(f"mask: the rollout has no completion of turn {reply.turn}")
        self._context.record(Masked(reply.turn, checked_reason(reason, "mask")))

    def give_reward(self, value: float) -> None:
        """Give a reward to the latest completion of this conversation. Rewards of one completion add up.

        They are in the outcome as `turn_rewards`, and with `reward_rule = "own"` in the rewards of the samples. A tool and a reward
        may call it, too.

        Args:
            value: a number from -1e9 to 1e9.

        Raises:
            RolloutEnded: once the end of the rollout is decided.
            AgentMistake: for another value, before the first completion, and for more than 1,000 rewards of one completion.
        """
        self._context.record(Rewarded(*checked_turn_reward(value, self._machine, self._conversation)))

    def now(self) -> datetime:
        """Return the time in UTC and record it. A replay gets the same value."""
        return now(self._context, self._conversation)

    def random(self) -> Random:
        """Return the conversation's random generator, always the same object.

        Its seed is recorded, so a replay draws the same numbers.
        """
        if self._random is None:
            self._random = random(self._context, self._conversation)
        return self._random

    async def once(self, function: Callable[[], T | Awaitable[T]]) -> T:
        """Call a function with side effects once: the result is recorded, and a replay gets the recorded result without a call.

        A synchronous function runs in a thread. The result must be serializable as JSON and is returned as parsed from JSON.
        Exceptions of the function are not recorded.
        """
        return await once(self._context, self._conversation, function)

    def model(self, name: str) -> ModelClient:
        """Return a further model, such as a judge: `await run.model("judge").sample([...])`. A reward may call it, too.

        Its endpoint is in the request's `models` or in the server's setting ROLLOUT_MODELS. Raises `AgentMistake`, which lists
        the names that exist, for any other name.
        """
        return RolloutModel(self._context, self._conversation, name)

    def wait(self, work: Coroutine[Any, Any, R]) -> R:
        """Await a coroutine from a synchronous method of the agent, which runs in a thread: `run.wait(run.sample())`.

        Raises what `work` raises, and `AgentMistake` if it is not a coroutine or if called on the event loop.
        """
        if not isinstance(work, Coroutine):
            raise AgentMistake(f"run.wait needs a coroutine, such as run.sample(), not {work!r:.100}")
        return self._context.wait(work)

    def note(self, code: str, text: str) -> None:
        """Append a note to the rollout's log, where watchers see it. Raise `AgentMistake` if code or text is not a string."""
        self._note(self._conversation.turn, *checked_note(code, text))

    async def finish(self, reason: str = "stop") -> NoReturn:
        """End the rollout with a reason that the agent chooses. Raise `AgentMistake` for an invalid reason."""
        await self._context.finish_replay(self._conversation)
        # It ends the whole rollout, so the run of a conversation that a compaction has replaced will do, too.
        closed = () if self._conversation is self._machine.main else (State.CLOSED,)
        await self._context.check(self._conversation, State.OPEN, *closed)
        stop = self._machine.natural_stop()
        self._context.end(Stop(checked_reason(reason, "finish"), stop.truncated))

    def close(self, end: End, reward: RewardResult | None = None) -> None:
        """End the run: no further commands are possible, also not for a reward. `reward` holds the `extra_json` of a failure."""
        self.ending.reach(end, reward)

    def call_before_end(self) -> None:
        """Call the functions of `RunContext.before_end`, each once."""
        while self._context.before_end:
            self._context.before_end.pop(0)()

    @property
    def latest(self) -> Run:
        """The run that continues this run's conversation: itself, or the last of the compactions that replaced it."""
        run = self
        while run._successor is not None:
            run = run._successor
        return run

    @property
    def under_way(self) -> Sequence[asyncio.Task[object]]:
        """The tasks that wait for completions or tools."""
        return self._context.under_way

    async def run_in_thread(self, name: str, function: Callable[[], R]) -> R:
        """Run a synchronous function of the agent in a thread. On cancellation the thread is abandoned."""
        return await self._context.run_in_thread(name, function)

    async def threads_ended(self) -> None:
        """Wait until the threads of the agent that were abandoned have ended."""
        await self._context.threads_ended()

    def _abandon_turn(self, turn: int) -> None:
        """Record that the agent stopped waiting for a completion.

        The trainer may already count the turn as generated. In the main conversation the next turn would then not match the
        trainer's history, so the rollout fails. In a fork only that conversation is closed.
        """
        if self.ending.is_requested or self.ending.is_reached:
            return
        if self._conversation is not self._machine.main:
            self._give_up(turn)
            return
        text = (
            f"turn {turn}: the agent cancelled the completion request. The trainer may have generated the turn, so the rollout "
            "cannot continue without it"
        )
        self.ending.reach(Failure(Category.INTERNAL, text, turn, source=FailureClass.ENVIRONMENT))

    def _give_up(self, turn: int) -> None:
        """Close the conversation, whose open turn gets no completion."""
        if not (self.ending.is_requested or self.ending.is_reached):
            self._context.record(GivenUp(turn, self._conversation.id))

    async def _skips(self) -> bool:
        """Return whether a command that records nothing is skipped: in a replay, the log does not say when it was issued."""
        await asyncio.sleep(0)
        return self._rollout.replay is not None

    async def _check_growth(self, of: str, *states: State) -> None:
        await asyncio.sleep(0)  # an agent that only appends or forks in a loop must not block the event loop

        def has_room() -> bool:
            check_room(self._machine, self._conversation, of)
            return False

        await self._context.ready(self._conversation, *states, ends=has_room)
        has_room()

    def _note(self, turn: int, code: str, text: str) -> None:
        with suppress(RolloutEnded):
            self._context.record(Note(turn, code, text))
