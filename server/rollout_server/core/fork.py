"""How conversations are opened: the record that opens one, whether it fits the state, and the conversation that it opens."""

from __future__ import annotations

from dataclasses import replace

from rollout_server.core.conversation import Conversation, State
from rollout_server.core.ledger import Ledger, Origin, Parting, SegmentKind
from rollout_server.core.record import Forked


def fork_record(draft: Forked, forked: Conversation, ledger: Ledger) -> Forked:
    """Return the record that would open a conversation now. Changes nothing.

    A branch has the messages and the model of its parent, a compaction that replaces its parent has its role. MAIN opens the
    conversation of the rollout's first segment: in place of `forked`, or anew if a turn of it was given up, or it is a compaction.

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


def fork_fits(record: Forked, forked: Conversation, ledger: Ledger, *, main: bool) -> bool:
    """Return whether the record fits the state of the conversation that it forks. `main`: that is the main conversation."""
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
            possible = main and unanswered and not record.role.model
        case _:
            possible = False
    branches = kind is SegmentKind.BRANCH
    if not possible or bool(record.messages) is branches or (record.after_turn and not branches):
        return False
    return fork_record(record, forked, ledger) == record


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
