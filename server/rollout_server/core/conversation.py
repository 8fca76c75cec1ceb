"""A conversation: a list of messages with its ledger, and the state of its turns and tool calls.

Nearly every rollout has one. An agent that forks has several, each with at most one open turn. Limits, metrics and the outcome
belong to the rollout; the machine keeps them.

    OPEN --Asked--> ASKING --Answered--> OPEN --ToolStarted--> CALLING --last ToolReturned--> OPEN
    ASKING --GivenUp--> CLOSED        OPEN --Forked as its compaction--> CLOSED

A conversation remembers where each of its turns ended. A branch may begin there later, whatever the state by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from rollout_server.core.ledger import AGENT, BranchPoint, ConversationLedger, Parting, Role
from rollout_server.core.message import Message
from rollout_server.core.record import Answered, Note, ToolReturned, ToolStarted


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
