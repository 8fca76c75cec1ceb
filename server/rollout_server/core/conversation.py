"""A conversation: a list of messages with its ledger, and the state of its turns and tool calls.

Nearly every rollout has one. An agent that forks has several, each with at most one open turn. Limits, metrics and the outcome
belong to the rollout; the machine keeps them.

    OPEN --Asked--> ASKING --Answered--> OPEN --ToolStarted--> CALLING --last ToolReturned--> OPEN
    ASKING --GivenUp--> CLOSED        OPEN --Forked as its compaction--> CLOSED

A conversation remembers where each of its turns ended. A branch may begin there later, whatever the state by then.

Below the class: the record that opens a conversation, whether it fits the state, and the conversation that it opens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from rollout_server.core.ledger import (
    AGENT,
    BranchPoint,
    ConversationLedger,
    Ledger,
    Origin,
    Parting,
    Role,
    SegmentKind,
)
from rollout_server.core.message import Message
from rollout_server.core.record import Answered, Forked, Note, ToolReturned, ToolStarted


class State(Enum):
    """The state of a conversation. A rollout has that of its main conversation, or ENDED."""

    OPEN = "open"
    ASKING = "asking"
    CALLING = "calling"
    CLOSED = "closed"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """A conversation right after the completion of a turn.

    Args:
        point: its tokens.
        messages: the number of its messages, including the completion.
        turn_messages: the number of messages when the turn was requested.
        completion: the completion.
    """

    point: BranchPoint
    messages: int
    turn_messages: int
    completion: Answered


class Conversation:
    """One conversation. Only the machine changes it.

    Attributes:
        line: the ledger of the conversation.
        messages: all messages so far.
        turn: the number of its last turn, unique in the rollout; 0 before its first turn.
        turn_messages: the number of messages when its last turn was requested.
        calls: the number of tool calls of its last turn that were started.
        last_completion: the completion of its last turn.
        ends: the ends of its turns that have a completion, by turn; in a branch also those of its parent up to there.
        resampled: the note that its open turn may have been generated more than once.
        returned: tool results that are not messages yet, by index of the call.
    """

    def __init__(self, line: ConversationLedger, messages: Sequence[Message]) -> None:
        self.line = line
        self.messages = list(messages)
        self.state = State.OPEN
        self.turn = 0
        self.turn_messages = 0
        self.calls = 0
        self.last_completion: Answered | None = None
        self.ends: dict[int, TurnEnd] = {}
        self.resampled: Note | None = None
        self.returned: dict[int, ToolReturned] = {}
        self._pending: dict[int, ToolStarted] = {}

    @property
    def id(self) -> str:
        """The id of the segment that its next turn continues; records refer to the conversation by it."""
        return self.line.id

    @property
    def role(self) -> Role:
        """The part that it plays in the rollout."""
        return self.line.role

    def branch(self, role: Role = AGENT, after_turn: int = 0, parting: Parting | None = None) -> Conversation:
        """Return a new conversation with the messages and tokens at the end of a turn of `ends`; with 0, with those so far."""
        end = self.ends.get(after_turn)
        if end is None:
            branch = Conversation(self.line.branch(role, parting=parting), self.messages)
            branch.turn, branch.turn_messages = self.turn, self.turn_messages
            branch.last_completion, branch.ends = self.last_completion, dict(self.ends)
            return branch
        branch = Conversation(self.line.branch(role, end.point, parting), self.messages[: end.messages])
        branch.turn, branch.turn_messages, branch.last_completion = after_turn, end.turn_messages, end.completion
        branch.ends = {turn: each for turn, each in self.ends.items() if turn <= after_turn}
        return branch

    def restart(self, messages: Sequence[Message], role: Role) -> None:
        """Replace the messages and the role of a conversation that had no turn yet."""
        self.messages, self.line.role = list(messages), role

    def begin_turn(self, turn: int) -> None:
        """Record that a turn was requested."""
        self.turn, self.turn_messages, self.calls = turn, len(self.messages), 0
        self.resampled = None
        self.state = State.ASKING

    def complete_turn(self, record: Answered) -> None:
        """Record the completion of the open turn."""
        self.last_completion = record
        self.messages.append(record.message)
        self.ends[record.turn] = TurnEnd(self.line.branch_point(), len(self.messages), self.turn_messages, record)
        self.state = State.OPEN

    def begin_call(self, record: ToolStarted) -> None:
        """Record that a tool call started."""
        self.calls += 1
        self._pending[record.index] = record
        self.state = State.CALLING

    def waits_for(self, record: ToolReturned) -> bool:
        """Return whether this is the result of a call that is running."""
        started = self._pending.get(record.index)
        return started is not None and started.call == record.call and started.turn == record.turn

    def end_call(self, record: ToolReturned) -> bool:
        """Record a tool result. Return whether it was the last one outstanding.

        Results become messages together, in the order of the calls, once no call is running.
        """
        del self._pending[record.index]
        self.returned[record.index] = record
        if self._pending:
            return False
        self.messages += [self.returned[index].message for index in sorted(self.returned)]
        self.state = State.OPEN
        return True


def fork_record(draft: Forked, forked: Conversation, ledger: Ledger) -> Forked:
    """Return the record that would open a conversation now. Changes nothing.

    A branch has the messages and the model of its parent, a compaction that replaces its parent has its role. MAIN opens the
    conversation of the rollout's first segment: in place of `forked`, or anew if a turn of it was given up, or it is a compaction,
    or an agent is run anew after a restart.

    Args:
        draft: the record with the kind and the parting of its origin, and all that the agent chooses. The rest is set here.
        forked: the conversation that is forked.
        ledger: the rollout's ledger.
    """
    kind, parting, role = draft.origin.kind, draft.origin.parting, draft.role
    origin, segment_id, count = Origin(kind, forked.id, 0, parting), ledger.next_id, len(draft.messages)
    if kind is SegmentKind.BRANCH:
        end = forked.ends.get(draft.after_turn)
        point, count = (forked.line.branch_point(), len(forked.messages)) if end is None else (end.point, end.messages)
        origin, role = replace(point.origin, parting=parting), replace(role, model=forked.role.model)
    elif kind is SegmentKind.MAIN:
        in_place = not forked.turn and forked.line.origin.kind is kind
        origin, segment_id = Origin(kind), forked.id if in_place else segment_id
    elif _replaces(kind, parting):
        role = forked.role
    return replace(draft, segment_id=segment_id, of=forked.id, origin=origin, count=count, role=role)


def fork_fits(record: Forked, forked: Conversation, ledger: Ledger, *, main: bool, resumed: bool) -> bool:
    """Return whether the record fits the state of the conversation that it forks.

    `main`: that is the main conversation. `resumed`: the rollout continues after a restart, so its agent may be run anew.
    """
    kind, parting, open_ = record.origin.kind, record.origin.parting, forked.state is State.OPEN
    match kind:
        case SegmentKind.BRANCH:
            possible = record.after_turn in forked.ends or (open_ and not record.after_turn)
        case SegmentKind.SUBAGENT:
            possible = True
        case SegmentKind.COMPACTION:
            possible = open_ or parting is not None
        case SegmentKind.DRIFT:
            possible = parting is not None
        case SegmentKind.MAIN:
            unanswered = not forked.ends and forked.state in (State.OPEN, State.CLOSED)
            anew = resumed and forked.state is not State.ASKING and _trains_nothing(forked, ledger)
            possible = main and (unanswered or anew) and not record.role.model
        case _:
            possible = False
    branches = kind is SegmentKind.BRANCH
    if not possible or bool(record.messages) is branches or (record.after_turn and not branches):
        return False
    return fork_record(record, forked, ledger) == record


def _trains_nothing(conversation: Conversation, ledger: Ledger) -> bool:
    """Return whether all turns of the conversation are masked, as those of an earlier attempt are."""
    spans = (span for segment in ledger.segments for span in segment.spans)
    return conversation.ends.keys().isdisjoint(span.turn for span in spans if span.trains)


def open_conversation(record: Forked, forked: Conversation, ledger: Ledger) -> Conversation:
    """Return the conversation that a fitting record opens."""
    kind, role = record.origin.kind, record.role
    if kind is SegmentKind.BRANCH:
        return forked.branch(role, record.after_turn, record.origin.parting)
    if record.segment_id == forked.id:
        forked.restart(record.messages, role)
        return forked
    return Conversation(ledger.open(record.origin, role), record.messages)


def replaces(record: Forked) -> bool:
    """Return whether the conversation that is forked ends, and the opened one takes its place.

    That of an agent that owns its loop never ends: any later call may continue it.
    """
    return record.origin.kind is SegmentKind.MAIN or _replaces(record.origin.kind, record.origin.parting)


def _replaces(kind: SegmentKind, parting: Parting | None) -> bool:
    return kind is SegmentKind.COMPACTION and parting is None
