"""The machine: the referee between an agent, a trainer and the tools.

Theory. An agent says what it wants (`request_completion`, `start_calls`), the world says what happened (an answer, a tool's
result, a timer, a cancel), and all of it is written down as one list of records. The machine reads records and nothing else:
the state of a rollout is a fold over its log, so the same records give the same outcome, and a log can be replayed. It holds
no clock and does no I/O; whoever drives it performs what `Asked` and `ToolStarted` want and comes back with the result.

A rollout has conversations, nearly always one (`core.conversation` has their states). Records name a conversation by a segment of
it, or by a turn, and several may wait for their answers at the same time. What they use up is the rollout's, and so is its
outcome, whose messages are those of the main conversation: the first one, or what took its place as its compaction.

Laws (tests/core/test_machine.py): each intent takes its own result and nothing else; no new intent once a limit is met; exactly one
outcome, which always holds messages, ledger and metrics so far; the same records give the same outcome.

A record that does not fit the state is a fault in our code, never of a trainer or an author: `IllegalRecord`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rollout_server.core.conversation import Conversation, State
from rollout_server.core.ledger import Ledger, Origin, SegmentKind, Turn
from rollout_server.core.limits import Limits
from rollout_server.core.message import Message, ToolCall
from rollout_server.core.outcome import Failure, Metrics, Outcome, Stop, Warned
from rollout_server.core.record import (
    RESAMPLED,
    Accepted,
    Answered,
    Appended,
    Asked,
    Consequence,
    DriftFound,
    Ended,
    Forked,
    GivenUp,
    Input,
    Masked,
    Note,
    Observed,
    Record,
    SegmentOpened,
    ToolReturned,
    ToolStarted,
)
from rollout_server.core.spec import Sampling
from rollout_server.core.usage import Usage

_FORKS = (SegmentKind.BRANCH, SegmentKind.SUBAGENT, SegmentKind.COMPACTION)


class IllegalRecord(Exception):
    """A record that does not fit the state it meets: our fault."""


@dataclass(frozen=True, slots=True)
class LimitReached:
    """Why an intent is not possible: a limit is met."""

    stop: Stop


class Machine:
    """One rollout. `accept` is the only way in."""

    def __init__(self, uid: str, messages: Sequence[Message], limits: Limits) -> None:
        self.uid = uid
        self.limits = limits
        self.ledger = Ledger()
        self.main = Conversation(self.ledger.main, messages)
        self.turn = 0
        self._conversations = {self.main.id: self.main}
        self._turns: dict[int, Conversation] = {}
        self._usage = Usage(limits)
        self._usage.add_messages(messages)
        self._warnings: list[Warned] = []
        self._outcome: Outcome | None = None
        self._begun = False

    @property
    def state(self) -> State:
        """Where the main conversation is, or that the rollout has ended."""
        return self.main.state if self._outcome is None else State.ENDED

    @property
    def messages(self) -> Sequence[Message]:
        """The main conversation so far. Only the machine adds to it."""
        return self.main.messages

    @property
    def metrics(self) -> Metrics:
        """What was used so far."""
        return self._usage.metrics

    @property
    def outcome(self) -> Outcome | None:
        """The terminal value, once there is one."""
        return self._outcome

    @property
    def size(self) -> int:
        """About how many bytes the rollout holds: messages and tokens, each in the log and in what was made of it."""
        return 2 * self._usage.bytes + self._usage.observed + 16 * sum(len(segment) for segment in self.ledger.segments)

    def find(self, record: Record) -> Conversation:
        """The conversation that an accepted record belongs to; the main one where it says nothing of it."""
        named = self._conversations.get(getattr(record, "segment_id", ""))
        return named or self.of_turn(getattr(record, "turn", 0))

    def of_turn(self, turn: int) -> Conversation:
        """The conversation that asked for a turn; the main one where none did."""
        return self._turns.get(turn, self.main)

    def request_completion(
        self, conversation: Conversation | None = None, sampling: Sampling | None = None
    ) -> Asked | LimitReached:
        """What a completion at this point would be, or why there is none to be. `sampling` as in `Asked`."""
        met = self._usage.met(self.turn)
        if met is not None:
            return LimitReached(self._stop(met))
        conversation = conversation or self.main
        turn = self.turn + 1
        return Asked(
            turn, conversation.id, f"{self.uid}/{conversation.id}/{turn}", len(conversation.messages), sampling
        )

    def start_calls(
        self, calls: Iterable[ToolCall], conversation: Conversation | None = None
    ) -> tuple[ToolStarted, ...] | LimitReached:
        """What running these calls would be, or why they do not run."""
        caller = conversation or self.main
        met = self._usage.met_by_calls(caller.calls)
        if met is not None:
            return LimitReached(self._stop(met))
        first = caller.calls
        return tuple(ToolStarted(caller.turn, index, call, caller.id) for index, call in enumerate(calls, start=first))

    def fork(self, kind: SegmentKind, messages: tuple[Message, ...] = (), of: Conversation | None = None) -> Forked:
        """What opening a conversation at this point would be. A branch has the messages of the one that it is forked of."""
        forked = of or self.main
        origin = forked.line.branch_origin() if kind is SegmentKind.BRANCH else Origin(kind, forked.id)
        return Forked(self.ledger.next_id, forked.id, origin, len(messages or forked.messages), messages)

    def natural_stop(self) -> Stop:
        """How a rollout ends whose agent has nothing more to do: a token limit that was met goes first."""
        return self._stop(self._usage.met() or "stop")

    def accept(self, record: Input) -> tuple[Record, ...]:
        """Applies a record. Returns what belongs into the log: what follows from it, then the record. Raises `IllegalRecord`."""
        if self._outcome is not None:
            raise IllegalRecord(f"{type(record).__name__} after the end")
        follows: tuple[Consequence, ...] = ()
        if isinstance(record, Answered):
            follows, record = self._apply_answered(record)
        else:
            self._apply(record)
        self._begun = True
        return (*follows, record)

    def _apply(self, record: Input) -> None:
        match record:
            case Asked():
                self._apply_asked(record)
            case Appended():
                self._apply_appended(record)
            case ToolStarted():
                self._apply_tool_started(record)
            case ToolReturned():
                self._apply_tool_returned(record)
            case Forked():
                self._apply_forked(record)
            case GivenUp():
                self._apply_given_up(record)
            case Observed():
                self._named_conversation(record.segment_id, record)
                self._usage.observed += len(record.value_json)
            case Masked():
                self._apply_masked(record)
            case Ended():
                self._apply_ended(record)
            case Accepted():
                self._require(not self._begun, record)
            case Note():
                self._apply_note(record)
            case _:
                raise IllegalRecord(f"{type(record).__name__} follows from other records and is not accepted")

    def _named_conversation(self, segment_id: str, record: Record) -> Conversation:
        conversation = self._conversations.get(segment_id)
        if conversation is None:
            raise IllegalRecord(f"{record!r}: there is no conversation {segment_id!r}")
        return conversation

    def _apply_asked(self, record: Asked) -> None:
        conversation = self._named_conversation(record.segment_id, record)
        self._require(
            conversation.state is State.OPEN and record == self.request_completion(conversation, record.sampling),
            record,
            conversation,
        )
        self.turn = record.turn
        self._turns[record.turn] = conversation
        conversation.begin_turn(record.turn)

    def _apply_answered(self, record: Answered) -> tuple[tuple[Consequence, ...], Answered]:
        conversation = self._turns.get(record.turn, self.main)
        held = conversation.line.tokens
        fits = conversation.state is State.ASKING and record.turn == conversation.turn and 0 <= record.shared <= held
        self._require(fits, record, conversation)
        follows = self._commit(conversation, record)
        self._usage.add_completion(record, conversation.line)
        self._warnings.extend(Warned(code, text, record.turn) for code, text in record.notes)
        opened = [consequence.origin for consequence in follows if isinstance(consequence, SegmentOpened)]
        extends = all(o.kind is SegmentKind.BRANCH and o.parent_tokens == held for o in opened)
        logged = _compact(record, held) if extends else record
        conversation.complete_turn(logged)
        return follows, logged

    def _commit(self, conversation: Conversation, record: Answered) -> tuple[Consequence, ...]:
        answer, line = record.token_ids, conversation.line
        if answer is None or (record.reported is None and (record.predicted is None or line.gap)):
            self._skip(conversation, record)
            return ()
        late = line.gap and line.segment is None
        ledger_id, segments = line.id, len(self.ledger.segments)
        prompt = record.predicted, record.reported
        turn = Turn(record.turn, answer, record.logprobs, *prompt, record.policy_version, record.planes, record.shared)
        try:
            drift = line.commit(turn)
        except ValueError as error:
            raise IllegalRecord(f"turn {record.turn}: {error}") from error
        if late:
            self._warn_of_gap(
                record.turn, "the answers before this turn came without ids: they are part of its masked prompt"
            )
        follows: list[Consequence] = []
        if drift is not None:
            found = DriftFound(record.turn, ledger_id, drift, record.around)
            follows.append(found)
            self._warnings.append(Warned("token_drift", found.text, record.turn, drift.index))
        if len(self.ledger.segments) > segments:
            opened = self.ledger.segments[-1]
            self._conversations[opened.id] = conversation
            follows.append(SegmentOpened(record.turn, opened.id, opened.origin, opened.spans[0].stop))
        return tuple(follows)

    def _skip(self, conversation: Conversation, record: Answered) -> None:
        if conversation.line.segment is not None and not conversation.line.gap:
            missing = "token_ids" if record.token_ids is None else "prompt_token_ids"
            self._warn_of_gap(record.turn, f"the trainer sent no {missing}, so the turn is in no training sample")
        conversation.line.gap = True

    def _warn_of_gap(self, turn: int, text: str) -> None:
        self._warnings.append(Warned("tokens_unknown", f"turn {turn}: {text}", turn))

    def _apply_appended(self, record: Appended) -> None:
        conversation = self._named_conversation(record.segment_id, record)
        self._require(conversation.state is State.OPEN, record, conversation)
        conversation.messages += record.messages
        self._usage.add_messages(record.messages)

    def _apply_tool_started(self, record: ToolStarted) -> None:
        caller = self._named_conversation(record.segment_id, record)
        fits = (
            record.index == caller.calls
            and record.turn == caller.turn
            and self._usage.met_by_calls(caller.calls) is None
        )
        self._require(caller.state in (State.OPEN, State.CALLING) and fits, record, caller)
        self._usage.tool_turns += not caller.calls
        caller.begin_call(record)

    def _apply_tool_returned(self, record: ToolReturned) -> None:
        caller = self._named_conversation(record.segment_id, record)
        self._require(caller.waits_for(record), record, caller)
        self._usage.add_messages([record.message])
        if caller.end_call(record):
            self._usage.add_calls(caller.returned.values())
            caller.returned.clear()

    def _apply_forked(self, record: Forked) -> None:
        forked, kind = self._named_conversation(record.of, record), record.origin.kind
        branches, open_ = kind is SegmentKind.BRANCH, forked.state is State.OPEN
        self._require(kind in _FORKS and bool(record.messages) is not branches, record, forked)
        self._require(replace(record, tools=()) == self.fork(kind, record.messages, forked), record, forked)
        self._require(open_ or (kind is SegmentKind.SUBAGENT and forked.state is not State.CLOSED), record, forked)
        opened = forked.branch() if branches else Conversation(self.ledger.open(record.origin), record.messages)
        self._usage.add_messages(record.messages)
        self._conversations[opened.id] = opened
        if kind is SegmentKind.COMPACTION:
            forked.state = State.CLOSED
            self.main = opened if forked is self.main else self.main

    def _apply_given_up(self, record: GivenUp) -> None:
        conversation = self._named_conversation(record.segment_id, record)
        fits = conversation.state is State.ASKING and conversation.turn == record.turn and conversation is not self.main
        self._require(fits, record, conversation)
        self._warn_of_resampling(conversation)
        conversation.state = State.CLOSED

    def has_completed(self, turn: int) -> bool:
        """Whether a turn was asked for and does not wait for its answer."""
        conversation = self._turns.get(turn)
        return conversation is not None and (conversation.state is not State.ASKING or conversation.turn != turn)

    def _apply_masked(self, record: Masked) -> None:
        self._require(self.has_completed(record.turn), record)
        for segment in self.ledger.segments:
            segment.mask_turn(record.turn)

    def _apply_note(self, record: Note) -> None:
        conversation = self._turns.get(record.turn)
        if conversation is not None and conversation.turn == record.turn and record.code == RESAMPLED:
            conversation.resampled = record

    def _apply_ended(self, record: Ended) -> None:
        for conversation in dict.fromkeys(self._conversations.values()):
            if conversation.state is State.ASKING:
                self._warn_of_resampling(conversation)
            self._usage.add_calls(conversation.returned.values())
        self._usage.metrics = replace(self.metrics, total_ms=record.total_ms, queued_ms=record.queued_ms)
        self._outcome = Outcome(
            end=replace(record.end, turn=self.turn) if isinstance(record.end, Failure) else record.end,
            messages=tuple(self.main.messages),
            segments=self.ledger.segments,
            metrics=self.metrics,
            reward_result=record.reward_result,
            warnings=tuple(self._warnings),
        )

    def _warn_of_resampling(self, conversation: Conversation) -> None:
        """No answer comes to tell of it."""
        if conversation.resampled is not None:
            self._warnings.append(Warned(RESAMPLED, conversation.resampled.text, conversation.turn))

    def _stop(self, reason: str) -> Stop:
        last = self.main.last_completion
        return Stop(reason, truncated=last is not None and last.finish_reason == "length")

    def _require(self, fits: bool, record: Record, conversation: Conversation | None = None) -> None:
        if not fits:
            conversation = conversation or self.main
            raise IllegalRecord(f"{record!r} in state {conversation.state.value}, turn {conversation.turn}")


def _compact(record: Answered, held: int) -> Answered:
    """The answer as it is logged: without the tokens of its prompt that the segment holds anyway."""
    if record.token_ids is None or record.reported is None or record.shared:
        return record
    return replace(record, reported=record.reported[held:], shared=held)


def replay(machine: Machine, records: Iterable[Record]) -> Machine:
    """Feeds a log to a fresh machine. Raises `IllegalRecord` where what follows is not what the log says."""
    logged: list[Record] = []
    for record in records:
        if isinstance(record, SegmentOpened | DriftFound):
            logged.append(record)
        elif machine.accept(record) != (*logged, record):
            raise IllegalRecord(f"the log says {logged!r} before {record!r}")
        else:
            logged.clear()
    if logged:
        raise IllegalRecord(f"the log ends with {logged!r}, which no record led to")
    return machine
