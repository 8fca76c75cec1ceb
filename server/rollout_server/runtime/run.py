"""What an agent's `play` holds: the only way in which it samples, calls tools and adds to the conversation (D2)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from rollout_server.core.machine import Over, State
from rollout_server.core.message import JSON, MalformedMessage, Message, ToolCall, parse_object, tool_calls
from rollout_server.core.outcome import Category, End, Failure, Stop
from rollout_server.core.record import (
    Answered,
    Appended,
    Asked,
    DriftFound,
    Note,
    Record,
    ToolReturned,
    ToolStarted,
)
from rollout_server.core.spec import DriftPolicy
from rollout_server.runtime.port import Ask, Failed, Sampler
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.toolbox import Toolbox, ToolResult


class RolloutOver(BaseException):
    """The rollout has come to its end: raised out of `play`, past any `except Exception` on the way. Let it pass."""

    def __init__(self, end: End) -> None:
        super().__init__(type(end).__name__)
        self.end = end


class AgentMistake(Exception):
    """The agent asked for something that makes no sense at this point."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer of the model: the message as it came, its tool calls, and the trainer's word for why it ended."""

    message: Mapping[str, JSON]
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str

    @property
    def content(self) -> str:
        """The text of the message; text parts are joined."""
        return text_of(self.message.get("content"))


class Run:
    """One rollout, as its agent sees it."""

    def __init__(self, rollout: Rollout, sampler: Sampler, toolbox: Toolbox) -> None:
        self._rollout = rollout
        self._machine = rollout.machine
        self._sampler = sampler
        self._toolbox = toolbox
        self._asked_messages = 0
        self._ignored = 0
        self.over: asyncio.Future[End] = asyncio.get_running_loop().create_future()

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
        """Completions asked for so far."""
        return self._machine.turn

    @property
    def metadata(self) -> Mapping[str, JSON]:
        """What the request says beside the conversation."""
        text = self._rollout.spec.metadata_json
        return parse_object(text) if text else {}

    @property
    def messages(self) -> Sequence[Mapping[str, JSON]]:
        """The conversation so far, parsed."""
        return [message.fields() for message in self._machine.messages]

    @property
    def cancelled(self) -> bool:
        """Somebody wants the rollout to end. Plain functions in threads may look at it."""
        return self._rollout.ending.done()

    async def sample(self) -> Reply:
        """Asks the model for the next message. Raises `RolloutOver` when a limit is met or the trainer fails."""
        await self._check()
        asked = self._machine.ask()
        if isinstance(asked, Over):
            self._end(asked.stop)
        ask = Ask(
            asked,
            self._machine.messages,
            self._machine.last_answer,
            self._asked_messages,
            self._rollout.deadline,
            self._rollout.credentials,
            self.note,
        )
        self._record(asked)
        self._asked_messages = asked.messages
        try:
            answered = await self._sampler.sample(ask)
        except Failed as failed:
            self._end(failed.failure)
        except asyncio.CancelledError:
            self._gave_up(asked.turn)
            raise
        self._follow_drift_policy(self._record(answered))
        return self._reply(answered)

    async def call(self, calls: Iterable[ToolCall]) -> Sequence[ToolResult]:
        """Runs tool calls at the same time and appends their results in the calls' order.

        Raises `RolloutOver` when a limit is met. A tool that fails answers the model, and so does one that the agent stops
        waiting for.
        """
        await self._check()
        started = self._machine.start_calls(calls)
        if isinstance(started, Over):
            self._end(started.stop)
        for intent in started:
            self._record(intent)
        if len(started) == 1:
            return [await self._call(started[0])]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._call(intent)) for intent in started]
        return [task.result() for task in tasks]

    async def append(self, *messages: Mapping[str, JSON]) -> None:
        """Adds messages to the conversation. They do not train."""
        await self._check()
        try:
            written = tuple(Message.write(message) for message in messages)
        except (MalformedMessage, TypeError, ValueError) as error:
            raise AgentMistake(f"not a message: {error}") from error
        if written:
            self._record(Appended(written))

    def note(self, code: str, text: str) -> None:
        """Leaves a remark that watchers see."""
        if self._machine.state is not State.ENDED:
            self._rollout.record(Note(self.turn, code, text))

    async def finish(self, reason: str = "stop") -> NoReturn:
        """Ends the rollout with a word of the agent's own."""
        await self._check()
        stop = self._machine.natural_stop()
        self._end(Stop(reason, stop.truncated))

    def close(self, end: End) -> None:
        """From now on nothing can be asked for: what a reward samples would be trained as part of the rollout."""
        self._decide(end)

    async def _call(self, intent: ToolStarted) -> ToolResult:
        started = self._rollout.clock.monotonic()
        try:
            result = await self._run_tool(intent)
        except asyncio.CancelledError:
            self._return(
                intent, ToolResult(intent.call, "Error: The call was given up before it returned", True), started
            )
            raise
        self._return(intent, result, started)
        return result

    async def _run_tool(self, intent: ToolStarted) -> ToolResult:
        limit = self._machine.limits.calls_per_turn
        if limit is not None and intent.index >= limit:
            text = f"Error: Too many tool calls in one turn; the first {limit} ran"
            return ToolResult(intent.call, text, failed=True)
        return await self._toolbox.run(intent.call)

    def _return(self, intent: ToolStarted, result: ToolResult, started: float) -> None:
        elapsed = 1000 * (self._rollout.clock.monotonic() - started)
        if self._machine.state is not State.ENDED:
            self._record(
                ToolReturned(intent.turn, intent.index, intent.call, result.message(), result.failed, elapsed),
            )

    def _gave_up(self, turn: int) -> None:
        """The agent stopped waiting for an answer. The trainer may count it, so that the next turn would not fit."""
        if self._rollout.ending.done() or self._machine.state is State.ENDED:
            return
        text = (
            f"turn {turn}: the agent stopped waiting for the trainer's answer. The turn may have been generated, so the rollout "
            "cannot go on without it"
        )
        self._decide(Failure(Category.INTERNAL, text, turn))

    def _follow_drift_policy(self, logged: Sequence[Record]) -> None:
        if self._rollout.spec.on_drift is not DriftPolicy.FAIL:
            return
        for record in logged:
            if isinstance(record, DriftFound):
                drift = record.drift
                text = (
                    f"{record.text}. It has {drift.reported} tokens, {drift.expected} were expected: its template, tools or "
                    'tokenizer differ from ours; with on_drift "warn" the rollout goes on in a new segment'
                )
                self._end(Failure(Category.TOKEN_DRIFT, text, record.turn))

    def _reply(self, answered: Answered) -> Reply:
        try:
            fields = answered.message.fields()
            return Reply(fields, tool_calls(fields), answered.finish_reason)
        except MalformedMessage as error:
            text = f"turn {answered.turn}: the trainer's message is malformed: {error}"
            self._end(Failure(Category.VALIDATION, text, answered.turn))

    def _record(self, record: Asked | Answered | Appended | ToolStarted | ToolReturned) -> tuple[Record, ...]:
        if self._machine.state is State.ENDED:
            raise RolloutOver(self._outcome_end())
        return self._rollout.record(record)

    async def _check(self) -> None:
        if self.over.done() or self._machine.state is State.ENDED:
            # Code that swallows its end and asks again must neither stop the event loop nor keep it busy.
            await asyncio.sleep(min(1.0, 0.01 * self._ignored))
            self._ignored += 1
            raise RolloutOver(self.over.result() if self.over.done() else self._outcome_end())
        if self._machine.state is not State.OPEN:
            raise AgentMistake(
                f"the rollout is {self._machine.state.value} in turn {self.turn}: await what is under way before asking for more"
            )

    def _outcome_end(self) -> End:
        outcome = self._machine.outcome
        return outcome.end if outcome is not None else Stop("stop")

    def _decide(self, end: End) -> None:
        if not self.over.done():
            self.over.set_result(end)

    def _end(self, end: End) -> NoReturn:
        self._decide(end)
        raise RolloutOver(end)


def text_of(content: JSON) -> str:
    """The text of a message's content: a string, or the text parts of a list."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts = (part.get("text") for part in content if isinstance(part, Mapping))
    return "".join(text for text in texts if isinstance(text, str))
