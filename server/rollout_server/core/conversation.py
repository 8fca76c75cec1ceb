"""A conversation: one list of messages with its line of the ledger, and what it waits for.

Nearly every rollout has one. An agent that forks has several, each with at most one open turn; limits, metrics and the outcome are
the rollout's, and kept by the machine.

    OPEN --Asked--> ASKING --Answered--> OPEN --ToolStarted--> CALLING --last ToolReturned--> OPEN
    ASKING --GivenUp--> CLOSED        OPEN --Forked as its compaction--> CLOSED
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from rollout_server.core.ledger import ConversationLedger
from rollout_server.core.message import Message
from rollout_server.core.record import Answered, Note, ToolReturned, ToolStarted


class State(Enum):
    """Where a conversation is, or a rollout by its main conversation."""

    OPEN = "open"
    ASKING = "asking"
    CALLING = "calling"
    CLOSED = "closed"
    ENDED = "ended"


class Conversation:
    """Changed by its machine only.

    Args:
        turn: the number of its last turn, unique in the rollout; 0: it had none.
        turn_messages: how many messages it had when its last turn was asked for.
        calls: how many tool calls ran of its last turn.
    """

    def __init__(self, line: ConversationLedger, messages: Sequence[Message]) -> None:
        self.line = line
        self.messages = list(messages)
        self.state = State.OPEN
        self.turn = 0
        self.turn_messages = 0
        self.calls = 0
        self.last_completion: Answered | None = None
        self.resampled: Note | None = None
        self.returned: dict[int, ToolReturned] = {}
        self._pending: dict[int, ToolStarted] = {}

    @property
    def id(self) -> str:
        """The segment that its next turn continues: what records call it by."""
        return self.line.id

    def branch(self) -> Conversation:
        """One that goes on from where this one is."""
        branch = Conversation(self.line.branch(), self.messages)
        branch.turn, branch.turn_messages, branch.last_completion = self.turn, self.turn_messages, self.last_completion
        return branch

    def begin_turn(self, turn: int) -> None:
        """A turn was asked for."""
        self.turn, self.turn_messages, self.calls = turn, len(self.messages), 0
        self.resampled = None
        self.state = State.ASKING

    def complete_turn(self, record: Answered) -> None:
        """The turn was answered."""
        self.last_completion = record
        self.messages.append(record.message)
        self.state = State.OPEN

    def begin_call(self, record: ToolStarted) -> None:
        """A tool call began."""
        self.calls += 1
        self._pending[record.index] = record
        self.state = State.CALLING

    def waits_for(self, record: ToolReturned) -> bool:
        """Whether this is the result of a call that runs."""
        started = self._pending.get(record.index)
        return started is not None and started.call == record.call and started.turn == record.turn

    def end_call(self, record: ToolReturned) -> bool:
        """A tool call ended. Returns whether it was the last one that ran: then all results are messages."""
        del self._pending[record.index]
        self.returned[record.index] = record
        if self._pending:
            return False
        self.messages += [self.returned[index].message for index in sorted(self.returned)]
        self.state = State.OPEN
        return True
