"""The steps of a log that is replayed: who issued each record, what it led to, and whether a command equals a recorded one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256

from rollout_server.core.machine import IllegalRecord, Machine
from rollout_server.core.message import Message
from rollout_server.core.record import (
    FIRST,
    Answered,
    Appended,
    Asked,
    CaptureSettled,
    Consequence,
    DriftFound,
    Ended,
    Forked,
    GivenUp,
    Input,
    Masked,
    ModelCalled,
    Note,
    Observed,
    Record,
    Resumed,
    Rewarded,
    SegmentOpened,
    ToolReturned,
    ToolStarted,
)


@dataclass(slots=True, eq=False)
class ReplayStep:
    """One input of the log, with the records that followed from it.

    Args:
        record: the input.
        follows: the records that the machine derived from it.
        sequence: its sequence number in the log.
        conversation: the first segment of the conversation in which it was issued.
        by_agent: whether the agent has to issue it again, before it is applied. Results and notes are applied by themselves, and so
            is what a tool did that is not called again.
        result: of a request for a completion or a tool call: the step with its result; None if the log has none.
        is_start: whether it stands for the start of a call of `once`, of which `record` is the result. It has no record of its own.
    """

    record: Input
    follows: tuple[Consequence, ...]
    sequence: int
    conversation: str
    by_agent: bool
    result: ReplayStep | None = None
    is_start: bool = False
    issued: bool = False
    applied: bool = False
    _waiters: list[asyncio.Future[None]] = field(default_factory=list)

    @property
    def position(self) -> tuple[int, int]:
        """Where it is in the order of the steps."""
        record = self.record
        return (record.after, record.number) if self.is_start and isinstance(record, Observed) else (self.sequence, 0)

    @property
    def is_result(self) -> bool:
        """Whether it ends a turn or a tool call."""
        return isinstance(self.record, Answered | GivenUp | ToolReturned)

    @property
    def by_play(self) -> bool:
        """Whether only `setup` and `play` can issue it, not a reward."""
        return self.by_agent and isinstance(self.record, Asked | Appended | ToolStarted | Forked | GivenUp)

    def apply(self, machine: Machine) -> None:
        """Apply it to the machine. Raises `IllegalRecord`, also if the machine derives other records than before."""
        if not self.is_start and machine.accept(self.record) != (*self.follows, self.record):
            raise IllegalRecord(f"the log says {self.follows!r} before {self.record!r}")
        self.applied = True

    def waiter(self) -> asyncio.Future[None]:
        """Return a future that `wake` completes."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(future)
        return future

    def wake(self) -> bool:
        """Let everything that waits go on. Return whether anything did."""
        waiting = [waiter for waiter in self._waiters if not waiter.done()]
        for waiter in waiting:
            waiter.set_result(None)
        self._waiters.clear()
        return bool(waiting)


class StepReader:
    """Reads a log from its second record on.

    A conversation is known by its first segment.

    Attributes:
        steps: the inputs.
        conversations: the conversation of each segment.
        turns: the conversation of each turn.
        obstacle: why the log cannot be replayed, as part of a sentence; empty if it can.
    """

    def __init__(self) -> None:
        self.steps: list[ReplayStep] = []
        self.conversations: dict[str, str] = {FIRST: FIRST}
        self.turns: dict[int, str] = {}
        self.obstacle = ""
        self._asked: dict[int, ReplayStep] = {}
        self._calls: dict[str, ReplayStep] = {}
        self._callers: set[str] = set()

    def read(self, records: Iterable[Record]) -> StepReader:
        """Read the records. Returns this object."""
        follows: list[Consequence] = []
        for sequence, record in enumerate(records, start=2):
            if isinstance(record, SegmentOpened | DriftFound):
                follows.append(record)
                continue
            self._add(record, tuple(follows), sequence)
            follows.clear()
        self._check_end(follows)
        self.steps.sort(key=lambda step: step.position)
        return self

    def _add(self, record: Input, follows: tuple[Consequence, ...], sequence: int) -> None:
        conversation = self._conversation_of(record)
        if isinstance(record, Asked):
            self.turns[record.turn] = conversation
        for each in follows:
            if isinstance(each, SegmentOpened):
                self.conversations[each.segment_id] = conversation
        by_agent = self._is_command(record) and not self._is_by_tool(record)
        step = ReplayStep(record, follows, sequence, conversation, by_agent)
        self.steps.append(step)
        self._link(step)
        settled = isinstance(record, CaptureSettled)
        if settled or (isinstance(record, Forked) and record.origin.parting is not None):
            self._refuse("its agent owns its loop")

    def _link(self, step: ReplayStep) -> None:
        """Link results to their requests, and note the conversations that are opened."""
        match step.record:
            case Forked(segment_id=opened) if opened not in self.conversations:
                self.conversations[opened] = opened
            case Observed(what="once") if step.by_agent:
                if step.record.concurrent:
                    self._refuse(
                        "calls of `once` in one conversation were concurrent, and a replay cannot tell them apart"
                    )
                self.steps.append(replace(step, follows=(), is_start=True))
            case Asked(turn=turn):
                self._asked[turn] = step
            case Answered(turn=turn):
                self._asked.pop(turn).result = step
            case GivenUp(turn=turn):
                self._asked.pop(turn)
            case ToolStarted():
                self._calls[step.record.key] = step
            case ToolReturned():
                self._calls.pop(step.record.key).result = step
                if step.record.used_state:
                    self._refuse(f"tool {step.record.call.name} used run.state, which a replay cannot restore")

    def _conversation_of(self, record: Input) -> str:
        named = record.of if isinstance(record, Forked) else getattr(record, "segment_id", None)
        if named is not None:
            return self.conversations[named]
        return self.turns.get(getattr(record, "turn", 0), FIRST)

    def _is_command(self, record: Input) -> bool:
        if isinstance(record, ToolReturned):
            return record.cancelled
        return not isinstance(record, Answered | Note | Resumed | Ended)

    def _is_by_tool(self, record: Input) -> bool:
        """Return whether a command was issued by a tool; note the calls that did so."""
        start: Input | None = record
        if isinstance(record, ToolReturned):
            start = self._calls[record.key].record
        caller = by_tool = getattr(start, "by_tool", "")
        while caller:
            self._callers.add(caller)
            if caller not in self._calls:
                self._refuse("a tool used the rollout after it had returned")
                break
            caller = getattr(self._calls[caller].record, "by_tool", "")
        return bool(by_tool)

    def _check_end(self, follows: Sequence[Consequence]) -> None:
        if follows:
            self._refuse("its log is incomplete")
        if not self._callers.isdisjoint(self._calls):
            self._refuse("a tool that uses the rollout itself was running")
        if any(getattr(step.record, "by_tool", "") for step in self._asked.values()):
            self._refuse("a completion that a tool had requested was being generated")

    def _refuse(self, why: str) -> None:
        self.obstacle = self.obstacle or why


def read_steps(records: Iterable[Record]) -> StepReader:
    """Read a log without its first record."""
    return StepReader().read(records)


def replay_obstacle(records: Sequence[Record]) -> str:
    """Return why an unfinished rollout cannot be continued by a replay of its log, as part of a sentence; empty if it can."""
    return read_steps(records[1:]).obstacle


def number_of(record: Input) -> tuple[str, int]:
    """Return what was called, "once" or the digest of a call of a model, and the number of the call in its conversation."""
    if isinstance(record, ModelCalled):
        return record.digest, record.number
    return "once", getattr(record, "number", 0)


def fits(draft: Input, recorded: Input) -> bool:
    """Return whether a command is the recorded one.

    Turns and segments are numbered over all conversations, so the numbers that it would get now do not count. Those of the log do.
    """
    match draft, recorded:
        case Asked(), Asked():
            return replace(draft, turn=recorded.turn, turn_key=recorded.turn_key) == recorded
        case ToolStarted(), ToolStarted():
            return replace(draft, repeatable=recorded.repeatable) == recorded
        case Forked(), Forked():
            return replace(draft, segment_id=recorded.segment_id) == recorded
        case Observed(), Observed():
            return (draft.what, draft.segment_id, draft.by_tool) == (
                recorded.what,
                recorded.segment_id,
                recorded.by_tool,
            )
        case _:
            return draft == recorded


def shown(record: Input) -> str:
    """Return a short description of a command. It has digests in place of texts, which may be secret."""
    text = type(record).__name__
    match record:
        case Asked():
            options = record.sampling and f", sampling {_digest(repr(record.sampling))}"
            text = f"sample with {record.messages} messages{options or ''}"
        case Appended(messages):
            text = f"append of {_messages(messages)}"
        case ToolStarted(turn, index, call):
            text = f"call {index} of turn {turn}: tool {call.name}, arguments {_digest(str(call.arguments))}"
        case Forked(origin=origin, messages=messages, after_turn=after):
            text = f"fork ({origin.kind.value}) with {_messages(messages)}{f' after turn {after}' if after else ''}"
        case Masked(turn, reason):
            text = f"mask of turn {turn}, reason {_digest(reason)}"
        case Rewarded(turn, value):
            text = f"give_reward({value:g}) for turn {turn}"
        case Observed(what=what):
            text = what
        case ModelCalled(model=model):
            text = f"sample of the model {model!r}"
        case GivenUp(turn=turn):
            text = f"cancellation of turn {turn}"
    return text


def _messages(messages: Sequence[Message]) -> str:
    if len(messages) == 1:
        return f"1 message ({messages[0].role}, {_digest(repr(messages[0].fields()))})"
    return f"{len(messages)} messages ({_digest(repr([message.fields() for message in messages]))})"


def _digest(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
