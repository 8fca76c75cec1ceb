"""The state machine of one rollout.

Theory. The agent states intents (`request_completion`, `start_calls`). The outside world returns results: a completion, a tool
result, a timeout, a cancellation. All of it is written down as one list of records. The machine reads records and nothing else:
the state of a rollout is a fold over its log. So the same records give the same outcome, and a log can be replayed. The machine
has no clock and does no I/O. Its driver performs what `Asked` and `ToolStarted` request, and comes back with the result.

A rollout has one or more conversations (`core.conversation` lists their states). A record refers to a conversation by one of its
segments, or by a turn. Several conversations may wait for completions at the same time. Usage and outcome belong to the rollout.
The outcome's messages are those of the main conversation: the first one, or its compaction, or the one that `CaptureSettled` names.

Laws (docs/design.md; tested in tests/core/test_machine.py): an intent accepts its own result and nothing else; no new intent once
a limit is met; exactly one outcome, always with the messages, ledger and metrics so far; the same records give the same one.

A record that does not fit the state raises `IllegalRecord`. It is always a bug of this server, never of a trainer or an author.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rollout_server.core.capture.report import CaptureReport
from rollout_server.core.conversation import (
    Conversation,
    State,
    fork_fits,
    fork_record,
    open_conversation,
    replaces,
)
from rollout_server.core.ledger import AGENT, Ledger, Origin, Parting, Role, SegmentKind, Turn
from rollout_server.core.limits import Limits
from rollout_server.core.message import Message, ToolCall
from rollout_server.core.outcome import Failure, Metrics, Outcome, Stop, TurnReward, Warned
from rollout_server.core.record import (
    LARGEST_TURN_REWARD,
    MOST_REWARDS_OF_A_TURN,
    RESAMPLED,
    Accepted,
    Answered,
    Appended,
    Asked,
    CaptureSettled,
    Consequence,
    Deed,
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
from rollout_server.core.spec import Sampling, Staleness
from rollout_server.core.staleness import PolicySteps, mask_stale, newest_step
from rollout_server.core.usage import Usage


class IllegalRecord(Exception):
    """A record does not fit the machine's state: a bug of this server."""


@dataclass(frozen=True, slots=True)
class LimitReached:
    """The reply to an intent that a limit forbids; `stop` is how the rollout ends."""

    stop: Stop


class Machine:
    """The state of one rollout. `accept` is the only method that changes it.

    Args:
        uid: the server's id of the rollout; part of every turn key.
        messages: the conversation that the rollout starts with.
        limits: the limits in force, after `settle`.
        staleness: how old its tokens may become; None: of any age.
    """

    def __init__(
        self, uid: str, messages: Sequence[Message], limits: Limits, staleness: Staleness | None = None
    ) -> None:
        self.uid = uid
        self.limits = limits
        self.ledger = Ledger()
        self.main = Conversation(self.ledger.main, messages)
        self.turn = 0
        self._conversations = {self.main.id: self.main}
        self._turns: dict[int, Conversation] = {}
        self._turn_segments: dict[int, str] = {}
        self._rewards: dict[int, list[float]] = {}
        self._usage = Usage(limits)
        self._usage.add_messages(messages)
        self._staleness = staleness
        self._steps = PolicySteps()
        self._warnings: list[Warned] = []
        self._capture: CaptureReport | None = None
        self._outcome: Outcome | None = None
        self._begun = self._resumed = False

    @property
    def state(self) -> State:
        """The state of the main conversation, or ENDED."""
        return self.main.state if self._outcome is None else State.ENDED

    @property
    def messages(self) -> Sequence[Message]:
        """The messages of the main conversation so far. Only the machine may add to them."""
        return self.main.messages

    @property
    def metrics(self) -> Metrics:
        """Resource use so far."""
        return self._usage.metrics

    @property
    def oldest_policy_step(self) -> int | None:
        """The lowest policy step of the tokens that train so far; None if it is unknown."""
        return self._steps.oldest

    @property
    def newest_policy_step(self) -> int | None:
        """The highest policy step that sampled a completion so far; None if it is unknown."""
        return self._steps.newest

    @property
    def rewards(self) -> Mapping[int, Sequence[float]]:
        """The rewards given so far, by turn, in the order in which they were given."""
        return self._rewards

    @property
    def outcome(self) -> Outcome | None:
        """The outcome, or None while the rollout runs."""
        return self._outcome

    @property
    def size(self) -> int:
        """Approximate memory of the rollout in bytes. Text counts twice, for log and conversation; a token counts 16 bytes."""
        return 2 * self._usage.bytes + self._usage.observed + 16 * sum(map(len, self.ledger.segments))

    def find(self, record: Record) -> Conversation:
        """Return the conversation that an accepted record belongs to; the main one if the record names none."""
        named = self._conversations.get(getattr(record, "segment_id", ""))
        return named or self.of_turn(getattr(record, "turn", 0))

    def of_turn(self, turn: int) -> Conversation:
        """Return the conversation of a turn; the main one for an unknown turn."""
        return self._turns.get(turn, self.main)

    def request_completion(
        self, conversation: Conversation | None = None, sampling: Sampling | None = None
    ) -> Asked | LimitReached:
        """Return the record that would request a completion now, or the limit that forbids it. Changes nothing.

        Args:
            conversation: the conversation to continue; None is the main one.
            sampling: the sampling parameters of this turn; None uses those of the spec.
        """
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
        """Return the records that would start these tool calls, or the limit that forbids them. Changes nothing."""
        caller = conversation or self.main
        met = self._usage.met_by_calls(caller.calls)
        if met is not None:
            return LimitReached(self._stop(met))
        first = caller.calls
        return tuple(ToolStarted(caller.turn, index, call, caller.id) for index, call in enumerate(calls, start=first))

    def fork(
        self,
        kind: SegmentKind,
        messages: tuple[Message, ...] = (),
        of: Conversation | None = None,
        role: Role = AGENT,
        *,
        after_turn: int = 0,
        parting: Parting | None = None,
    ) -> Forked:
        """Return the record that would open a conversation now; see `fork_record`. Changes nothing."""
        forked = of or self.main
        draft = Forked("", forked.id, Origin(kind, parting=parting), 0, messages, role=role, after_turn=after_turn)
        return fork_record(draft, forked, self.ledger)

    def natural_stop(self) -> Stop:
        """Return the stop of a rollout whose agent has finished. A token limit that is met is the reason, otherwise "stop"."""
        return self._stop(self._usage.met() or "stop")

    def accept(self, record: Input) -> tuple[Record, ...]:
        """Apply a record. Return what belongs in the log: the records that follow from it, then the record itself.

        Raises `IllegalRecord` if the record does not fit the state.
        """
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
            case Forked() | GivenUp() | Observed() | ModelCalled() | Masked() | Rewarded() | CaptureSettled():
                self._apply_deed(record)
            case Ended():
                self._apply_ended(record)
            case Accepted() | Resumed():
                self._require(self._begun is isinstance(record, Resumed), record)
                self._resumed = self._begun
            case Note():
                self._apply_note(record)
            case _:
                raise IllegalRecord(f"{type(record).__name__} follows from other records and is not accepted")

    def _apply_deed(self, record: Deed) -> None:
        match record:
            case Forked():
                self._apply_forked(record)
            case GivenUp():
                self._apply_given_up(record)
            case Observed() | ModelCalled():
                self._apply_observed(record)
            case Masked():
                self._apply_masked(record)
            case Rewarded():
                self._apply_rewarded(record)
            case CaptureSettled():
                self._apply_settled(record)

    def _named_conversation(self, segment_id: str, record: Record) -> Conversation:
        conversation = self._conversations.get(segment_id)
        if conversation is None:
            raise IllegalRecord(f"{record!r}: there is no conversation {segment_id!r}")
        return conversation

    def _apply_asked(self, record: Asked) -> None:
        conversation = self._named_conversation(record.segment_id, record)
        draft = replace(record, by_tool="") if record.by_tool else record
        fits = draft == self.request_completion(conversation, record.sampling)
        self._require(conversation.state is State.OPEN and fits, record, conversation)
        self.turn = record.turn
        self._turns[record.turn] = conversation
        conversation.begin_turn(record.turn)

    def _apply_answered(self, record: Answered) -> tuple[tuple[Consequence, ...], Answered]:
        conversation = self._turns.get(record.turn, self.main)
        length = conversation.line.tokens  # before the commit below, which changes it
        fits = conversation.state is State.ASKING and record.turn == conversation.turn and 0 <= record.shared <= length
        self._require(fits, record, conversation)
        follows = self._commit(conversation, record)
        self._usage.add_completion(record, conversation.line)
        self._steps.add(record, conversation.role, held=record.turn in self._turn_segments)
        self._warnings.extend(Warned(code, text, record.turn) for code, text in record.notes)
        opened = [consequence.origin for consequence in follows if isinstance(consequence, SegmentOpened)]
        # A branch opens its first segment with its first turn. If it kept all tokens of the parent, its prompt extends them too.
        extends = all(o.kind is SegmentKind.BRANCH and o.parent_tokens == length for o in opened)
        logged = record.without_prefix(length) if extends else record
        conversation.complete_turn(logged)
        return follows, logged

    def _commit(self, conversation: Conversation, record: Answered) -> tuple[Consequence, ...]:
        ids, line = record.token_ids, conversation.line
        if ids is None or (record.reported is None and (record.predicted is None or line.gap)):
            self._skip(conversation, record)
            return ()
        late = line.gap and line.segment is None  # earlier turns had no ids, and this one opens the first segment
        ledger_id, segments = line.id, len(self.ledger.segments)
        prompt = record.predicted, record.reported
        turn = Turn(record.turn, ids, record.logprobs, *prompt, record.policy_runs, record.planes, record.shared)
        try:
            drift = line.commit(turn)
        except ValueError as error:
            raise IllegalRecord(f"turn {record.turn}: {error}") from error
        self._turn_segments[record.turn] = line.id
        if late:
            self._warn_of_gap(
                record.turn, "the completions before this turn had no token ids; they are part of its masked prompt"
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
            self._warn_of_gap(
                record.turn, f"the completion came without {missing}, so no training sample contains the turn"
            )
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
        forked = self._named_conversation(record.of, record)
        fits = fork_fits(record, forked, self.ledger, main=forked is self.main, resumed=self._resumed)
        self._require(fits, record, forked)
        opened = open_conversation(record, forked, self.ledger)
        self._usage.add_messages(record.messages)
        self._conversations[opened.id] = opened
        if replaces(record) and opened is not forked:
            forked.state = State.CLOSED
            self.main = opened if forked is self.main else self.main

    def _apply_settled(self, record: CaptureSettled) -> None:
        main = self._named_conversation(record.segment_id, record)
        self._require(self._capture is None or self._resumed, record, main)
        self.main, self._capture, self._resumed = main, record.report, False

    def _apply_given_up(self, record: GivenUp) -> None:
        conversation = self._named_conversation(record.segment_id, record)
        fits = conversation.state is State.ASKING and conversation.turn == record.turn
        self._require(fits, record, conversation)
        self._warn_of_resampling(conversation)
        conversation.state = State.CLOSED

    def has_completed(self, turn: int) -> bool:
        """Return whether a turn was requested and is not open any more."""
        conversation = self._turns.get(turn)
        return conversation is not None and (conversation.state is not State.ASKING or conversation.turn != turn)

    def _apply_observed(self, record: Observed | ModelCalled) -> None:
        self._named_conversation(record.segment_id, record)
        text = record.value_json if isinstance(record, Observed) else record.message.text
        self._usage.observed += len(text)

    def _apply_masked(self, record: Masked) -> None:
        self._require(self.has_completed(record.turn), record)
        for segment in self.ledger.segments:
            segment.mask_turn(record.turn)
        self._steps.mask(self.ledger.segments)

    def _apply_rewarded(self, record: Rewarded) -> None:
        given = self._rewards.get(record.turn, [])
        fits = abs(record.value) <= LARGEST_TURN_REWARD and len(given) < MOST_REWARDS_OF_A_TURN  # NaN does not fit
        self._require(fits and self.has_completed(record.turn), record)
        self._rewards[record.turn] = [*given, record.value]

    def _apply_note(self, record: Note) -> None:
        conversation = self._turns.get(record.turn)
        if conversation is not None and conversation.turn == record.turn and record.code == RESAMPLED:
            conversation.resampled = record

    def _apply_ended(self, record: Ended) -> None:
        # One conversation has several keys, one per segment; `dict.fromkeys` removes duplicates and keeps the order.
        for conversation in dict.fromkeys(self._conversations.values()):
            if conversation.state is State.ASKING:
                self._warn_of_resampling(conversation)
            self._usage.add_calls(conversation.returned.values())
        self._usage.total_ms, self._usage.queued_ms = record.total_ms, record.queued_ms
        newest = newest_step(record.policy_step, self.newest_policy_step)
        self._warnings += mask_stale(self.ledger.segments, self._staleness, newest)
        self._outcome = Outcome(
            end=replace(record.end, turn=self.turn) if isinstance(record.end, Failure) else record.end,
            messages=tuple(self.main.messages),
            segments=self.ledger.segments,
            metrics=self.metrics,
            reward_result=record.final_reward,
            warnings=(*self._warnings, *record.warnings),
            turn_rewards=tuple(
                TurnReward(turn, math.fsum(values), self._turn_segments.get(turn, ""))
                for turn, values in sorted(self._rewards.items())
            ),
            reward_rule=record.reward_rule,
            capture=self._capture,
            policy_step=newest,
        )

    def _warn_of_resampling(self, conversation: Conversation) -> None:
        """Turn the note into a warning here, because the open turn will have no completion that carries it."""
        if conversation.resampled is not None:
            self._warnings.append(Warned(RESAMPLED, conversation.resampled.text, conversation.turn))

    def _stop(self, reason: str) -> Stop:
        last = self.main.last_completion
        return Stop(reason, truncated=last is not None and last.finish_reason == "length")

    def _require(self, fits: bool, record: Record, conversation: Conversation | None = None) -> None:
        if not fits:
            conversation = conversation or self.main
            raise IllegalRecord(f"{record!r} in state {conversation.state.value}, turn {conversation.turn}")


def replay(machine: Machine, records: Iterable[Record]) -> Machine:
    """Feed a log to a fresh machine. Raises `IllegalRecord` if the machine derives other records than the log contains."""
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
