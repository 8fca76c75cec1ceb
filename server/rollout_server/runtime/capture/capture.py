"""Runs the model calls of an agent that owns its loop, as `core.capture.tree` decides them.

Decisions are serial: a conversation is found, opened and marked as generating before the next call is looked at. Completions are
concurrent, each in a task of the capture. So a caller that disconnects cancels nothing: the same call gets the completion later.

The way of a call: `_begin`, under the lock, decides it, opens its conversation and starts its task; `_generate`, in the task,
samples and puts the completion into the tree; `_result_of` waits, once for each caller that shares the completion. A large call is
decided in a thread, so the tree grows only under the lock.

What the calls were can be recorded only until the end of the rollout is decided. So `settle` is called right before that, whatever
the end is; `close` is too late if the rollout was cancelled or its time was over.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol, Unpack

from rollout_server.core.capture.call import Completed, ModelCall
from rollout_server.core.capture.client_message import client_message
from rollout_server.core.capture.decision import (
    Branch,
    Continue,
    Decision,
    Delivering,
    FixedReply,
    Join,
    Open,
    Refuse,
    Replay,
    Settlement,
)
from rollout_server.core.capture.history import InvalidHistory
from rollout_server.core.capture.history_tree import Pending
from rollout_server.core.capture.rendering import LaterSystem
from rollout_server.core.capture.report import CaptureReport
from rollout_server.core.capture.rules import CaptureOptions
from rollout_server.core.capture.tree import CallTree
from rollout_server.core.conversation import Conversation
from rollout_server.core.error import CallRefused, NotFound, RolloutOver
from rollout_server.core.message import JSON
from rollout_server.core.outcome import Category, Failure, FailureClass, Stop
from rollout_server.core.record import Masked, Note
from rollout_server.core.segment import AGENT, Role, SegmentKind
from rollout_server.core.usage import lengths
from rollout_server.runtime.aio.event_loop import first_done
from rollout_server.runtime.capture.call_sampling import call_sampling
from rollout_server.runtime.capture.continuation import earlier_main, has_turns_of_this_process, is_settled
from rollout_server.runtime.capture.endpoint import (
    MOST_CALLS,
    FinishedWork,
    ModelAccess,
    repeats,
    too_many_calls,
)
from rollout_server.runtime.capture.endpoint_tools import EndpointTools
from rollout_server.runtime.capture.offered_tools import check_tool_room, conversation_tools
from rollout_server.runtime.errors import AgentMistake, PromptRefused, PromptTooLong, RolloutEnded, RolloutFailed
from rollout_server.runtime.run.arguments import SamplingOptions
from rollout_server.runtime.run.context import RunContext
from rollout_server.runtime.run.messages import Reply, checked_messages
from rollout_server.runtime.run.opening import Opening

_log = logging.getLogger(__name__)

AUXILIARY: Final = Role("auxiliary", trainable=False)
"""The role of a conversation that is beside the task, such as a call for a title."""
_GRACE_SECONDS: Final = 5.0
"""Seconds for the completions under way to end once they are cancelled."""
_LARGE_MESSAGES: Final = 200
_LARGE_TEXT: Final = 256 * 1024
"""Messages, and characters in them, beyond which a call is decided in a thread."""
_FIXED_REPLY: Final = "fixed-reply-"
"""Start of the ids of answers that no completion is behind. The ids of completions are hexadecimal."""
_MOST_NOTES: Final = 16
"""Different notes of one rollout about its calls."""


class CapturedRun(Protocol):
    """A conversation of the rollout, as `runtime.run.run.Run` implements it."""

    async def open(self, opening: Opening) -> CapturedRun:
        """Open a conversation. Raise `RolloutFailed` if the rollout's trainer does not support it."""

    async def append(self, *messages: Mapping[str, JSON]) -> None:
        """Append messages."""

    async def attempt(self, **sampling: Unpack[SamplingOptions]) -> Reply:
        """Request a completion. Raise `PromptRefused` without an end of the rollout."""

    def at(self, conversation: Conversation) -> CapturedRun:
        """Return a run of a conversation of an earlier process, to be read."""

    def settle(self, main: Any, report: CaptureReport) -> None:
        """Record what the calls were, and which conversation is the main one from now on."""


class Capture:
    """The model endpoint of one rollout. `Run.capture` opens it.

    Attributes:
        access: the base URL and the key for the agent's clients.
        options: what the agent's author decided.
        tools: the tools of the rollout.
    """

    def __init__(
        self,
        run: CapturedRun,
        context: RunContext,
        options: CaptureOptions,
        later: LaterSystem,
        tools: EndpointTools,
    ) -> None:
        self.access: ModelAccess = context.capture_ports.access(context.rollout.uid)
        self._root = self._main = run
        earlier = earlier_main(context.rollout)
        self._context = context
        self.options = options
        self.tools = tools
        self._tree = CallTree(options, later, None if earlier is None else earlier[0])
        if earlier is not None:
            self._main = run.at(earlier[1])
        self._lock = asyncio.Lock()
        self._runs: dict[int, CapturedRun] = {}
        self._tasks: dict[Pending, asyncio.Task[Completed]] = {}
        self._ids: dict[Pending, str] = {}
        self._completed: dict[str, Completed] = {}
        self._delivering: dict[str, asyncio.Event] = {}
        self._tools_size = 0
        self._calls = 0
        self._refused = 0
        self._notes: set[str] = set()
        self._quiet_since = self._now()
        self._finished: asyncio.Future[FinishedWork] = asyncio.get_running_loop().create_future()
        self._closed = False
        self._settled = False

    async def call(self, call: ModelCall, begun: Callable[[str], None] = lambda completion_id: None) -> Completed:
        """Return the completion of a call: see `AgentEndpoint.call`."""
        self._check_open()
        if self._calls >= MOST_CALLS:
            raise too_many_calls()
        self._calls += 1
        try:
            with self._refusals():
                while isinstance(found := await self._decided(call), Delivering):
                    event = self._delivering.setdefault(found.completion_id, asyncio.Event())
                    with suppress(TimeoutError):
                        await asyncio.wait_for(event.wait(), found.seconds)
                if isinstance(found, Completed):
                    return found
                begun(self._ids[found])
                return await self._result_of(found)
        finally:
            self._calls -= 1
            self._quiet_since = self._now()

    def confirm(self, completion_id: str) -> None:
        """Record that a completion reached the agent to its last byte. Raise `NotFound`, or `RolloutOver`."""
        if self._closed:
            raise RolloutOver()
        if not completion_id.startswith(_FIXED_REPLY) and not self._tree.confirmed(completion_id):
            raise NotFound(f"the rollout has no completion {completion_id!r:.100}", reason="COMPLETION_NOT_FOUND")
        if (event := self._delivering.pop(completion_id, None)) is not None:
            event.set()

    def finish(self, work: FinishedWork) -> bool:
        """End the agent's work: see `AgentEndpoint.finish`. Calls are refused from then on."""
        if self._finished.done():
            return repeats(self._finished.result(), work)
        ending = self._context.ending
        if self._closed or ending.is_requested or not isinstance(ending.end, Stop):
            raise RolloutOver()
        self._finished.set_result(work)
        self.tools.close()
        return False

    async def finished(self, idle_seconds: float) -> FinishedWork:
        """Wait until the agent ends its work.

        Raises:
            RolloutFailed: of the class ENVIRONMENT, once no call of the model or of a tool was open for `idle_seconds`.
            RolloutEnded: if the rollout ends meanwhile.
        """
        ending = self._context.ending
        while not (self._finished.done() or ending.is_reached):
            quiet_since = max(self._quiet_since, self.tools.quiet_since)
            busy = self._calls or self.tools.running
            left = idle_seconds if busy else quiet_since + idle_seconds - self._now()
            if left <= 0:
                text = f"the agent neither called its model or a tool nor finished for {idle_seconds:g} s; it is taken for dead"
                raise RolloutFailed(Failure(Category.INTERNAL, text, source=FailureClass.ENVIRONMENT))
            await first_done(self._finished, ending.reached, within=left)
        if not self._finished.done():
            raise RolloutEnded(ending.end)
        return self._finished.result()

    async def close(self) -> None:
        """End the endpoint: refuse calls, give up completions and tools, and settle. Only the first call has an effect."""
        self._closed = True
        tasks = [*self._tasks.values(), *self.tools.running]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_GRACE_SECONDS)
        self.settle()
        self._context.rollout.capture.close()

    def settle(self) -> None:
        """Refuse calls, and record what they were, unless the end of the rollout is decided. Only the first call has an effect."""
        self._closed = True
        self.tools.close()
        if not self._settled:
            self._settled = True
            with suppress(RolloutEnded):
                self._record_settlement(self._tree.settle())

    def _record_settlement(self, settlement: Settlement) -> None:
        if (
            settlement == Settlement(None, (), CaptureReport())
            and not self._refused
            and is_settled(self._context.rollout)
        ):
            return  # the earlier process has done it, and there was no call since
        for turn, reason in settlement.masked:
            self._context.record(Masked(turn, reason))
        main = self._main if settlement.main is None else self._runs[settlement.main]
        self._root.settle(main, replace(settlement.report, refused=self._refused))

    async def _decided(self, call: ModelCall) -> Completed | Pending | Delivering:
        async with self._lock:
            self._check_open()
            return await self._begin(call)

    async def _begin(self, call: ModelCall) -> Completed | Pending | Delivering:
        """Decide a call, and start its generation unless there is one, or its completion, already."""
        options, decision = self._sampling(call), await self._decide(call)
        match decision:
            case Refuse():
                raise CallRefused(decision.reason, decision.field, decision.text)
            case FixedReply():
                message = json.dumps({"role": "assistant", "content": decision.text}, ensure_ascii=False)
                return Completed(f"{_FIXED_REPLY}{decision.number}", message, "stop")
            case Replay():
                return replace(self._completed[decision.completion_id], replayed=True)
            case Delivering():
                return decision
            case Join():
                return decision.pending
        run = self._runs[decision.conversation] if isinstance(decision, Continue) else await self._open(decision, call)
        self._check_open()  # it may have been closed meanwhile
        pending = self._tree.begin(decision)
        self._runs[pending.conversation.id] = run
        messages = () if isinstance(decision, Open) else decision.messages
        self._ids[pending] = secrets.token_hex(16)
        self._tasks[pending] = task = asyncio.create_task(self._generate(pending, run, messages, options))
        task.add_done_callback(lambda task: self._on_generated(pending, task))
        return pending

    async def _decide(self, call: ModelCall) -> Decision:
        """Decide a call; a large one in a thread, so that it does not block the event loop. The lock is held meanwhile."""
        decide = partial(self._tree.decide, call, self._now())
        return await asyncio.to_thread(decide) if _is_large(call) else decide()

    async def _open(self, decision: Branch | Open, call: ModelCall) -> CapturedRun:
        """Open the conversation of a call. Raise `CallRefused` if the trainer does not support it."""
        parting, role = decision.parting, AUXILIARY if decision.auxiliary else AGENT
        if isinstance(decision, Branch):
            of, after = self._runs[decision.conversation], decision.after_turn
            opening = Opening(SegmentKind.BRANCH, after_turn=after, role=role, parting=parting)
            size = self._tools_size
        else:
            of = self._main if decision.kind is SegmentKind.MAIN else self._root
            tools = conversation_tools(call.tools, self._context.rollout.tools)
            size = check_tool_room(self._tools_size, tools)
            opening = Opening(decision.kind, checked_messages(decision.messages), tools, role=role, parting=parting)
        try:
            run = await of.open(opening)
        except RolloutFailed as failed:
            raise CallRefused("ONE_CONVERSATION", "messages", failed.failure.message) from None
        if opening.kind is SegmentKind.MAIN:
            self._main = run
        self._tools_size = size
        return run

    async def _generate(
        self, pending: Pending, run: CapturedRun, messages: Sequence[Mapping[str, JSON]], options: SamplingOptions
    ) -> Completed:
        """Request the completion of a call. The task belongs to the capture, not to a caller."""
        try:
            if messages:
                await run.append(*messages)
            reply = await run.attempt(**options)
            completed = self._completion(reply, self._ids[pending])
            self._completed[completed.id] = completed
            async with self._lock:  # a decision may be reading the tree in a thread
                self._tree.completed(pending, completed.id, reply.message, reply.turn, self._now())
        except BaseException as error:
            self._tree.failed(pending)
            raise self._failure(error) from None
        return completed

    def _failure(self, error: BaseException) -> BaseException:
        """Return what the callers of a completion that failed get. Ends the rollout unless it goes on, or has ended."""
        if isinstance(error, RolloutEnded | PromptRefused | AgentMistake | asyncio.CancelledError):
            return error
        turn, source = self._context.machine.turn, self._context.rollout.spec.completions.failure_class
        failure = Failure(
            Category.VALIDATION, f"the message of a completion is malformed: {error}", turn, source=source
        )
        if not isinstance(error, InvalidHistory):
            _log.error("a model call of rollout %s failed", self._context.rollout.uid, exc_info=error)
            text = "the completion of a model call failed; the server's log has the reason"
            failure = Failure(Category.INTERNAL, text, turn, source=FailureClass.SERVER)
        self._context.ending.reach(failure)
        return RolloutOver()

    def _completion(self, reply: Reply, completion_id: str) -> Completed:
        sampled = reply.sampled
        assert sampled is not None, "a reply of this rollout has its record"  # noqa: S101 - for the type checker
        generated, prompt = lengths(sampled, self._context.machine.of_turn(reply.turn).line)
        text = client_message(sampled.message)
        return Completed(completion_id, text, reply.finish_reason, prompt, generated, reply.turn)

    def _on_generated(self, pending: Pending, task: asyncio.Task[Completed]) -> None:
        del self._tasks[pending], self._ids[pending]
        if not task.cancelled():
            task.exception()  # callers may all be gone; asyncio must not log that nobody saw it

    async def _result_of(self, pending: Pending) -> Completed:
        """Wait for a completion, as one of the callers that do."""
        task, ending = self._tasks[pending], self._context.ending
        try:
            await first_done(task, ending.requested, ending.reached)
        except asyncio.CancelledError:
            self._tree.disconnected(pending)
            raise
        if not task.done() or task.cancelled():
            raise RolloutOver()
        return task.result()

    def _sampling(self, call: ModelCall) -> SamplingOptions:
        spec, client = self._context.rollout.spec, self.options.sampling == "client"
        options, unused = call_sampling(call.sampling, spec, client=client, has_tools=bool(call.tools))
        if unused:
            names = ", ".join(unused)
            self._note("sampling_overridden", f"the agent's {names} are not used: the rollout's values apply")
        if call.hosted_tools:
            names = ", ".join(sorted(set(call.hosted_tools)))
            self._note(
                "hosted_tools_dropped", f"the model is not offered {names:.500}: only their provider can run them"
            )
        return options

    def _note(self, code: str, text: str) -> None:
        """Append a note to the rollout's log, the same one only once."""
        if len(self._notes) < _MOST_NOTES and text not in self._notes:
            self._notes.add(text)
            self._context.record(Note(self._context.machine.turn, code, text))

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Turn what a conversation raises into the error of a call."""
        try:
            yield
        except CallRefused:
            self._refused += 1
            raise
        except PromptTooLong as error:
            self._refused += 1
            tokens, maximum, text = error.tokens or 0, error.maximum or 0, error.failure.message
            reason = "CONTEXT_LENGTH_EXCEEDED"
            raise CallRefused(reason, "messages", text, tokens=tokens, maximum=maximum) from None
        except (AgentMistake, PromptRefused) as error:
            self._refused += 1
            raise CallRefused("INVALID_CALL", "messages", str(error)) from None
        except RolloutEnded:
            raise RolloutOver() from None

    def _check_open(self) -> None:
        ending = self._context.ending
        if self._closed or self._finished.done() or ending.is_reached or ending.is_requested:
            raise RolloutOver()

    def _now(self) -> float:
        return self._context.rollout.clock.monotonic()


def _is_large(call: ModelCall) -> bool:
    """Return whether a call is so large that its comparison takes milliseconds."""
    if len(call.messages) > _LARGE_MESSAGES:
        return True
    left = _LARGE_TEXT
    pending: list[JSON] = [message.fields for message in call.messages]
    while pending and left > 0:
        value = pending.pop()
        left -= len(value) if isinstance(value, str) else 1
        if isinstance(value, Mapping | list):
            pending += value.values() if isinstance(value, Mapping) else value
    return left <= 0


@asynccontextmanager
async def open_capture(
    run: CapturedRun, context: RunContext, options: CaptureOptions, tools: EndpointTools
) -> AsyncIterator[Capture]:
    """Open the model endpoint of a rollout. It ends with the `async with` block. Raise `AgentMistake` for a second one."""
    context.refuse_replay("the model endpoint of an agent that owns its loop")
    capture = Capture(run, context, options, await context.capture_ports.later_system(context.rollout.spec), tools)
    if has_turns_of_this_process(context.rollout) or not context.rollout.capture.open(capture):
        raise AgentMistake("capture: a rollout has one model endpoint, opened once and before its first completion")
    context.before_end.append(capture.settle)  # the driver's cancellation of the block would come too late
    try:
        yield capture
    finally:
        await capture.close()
