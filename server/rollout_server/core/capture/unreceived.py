"""Which completions an agent that owns its loop may not have received when its server stopped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rollout_server.core.conversation import Conversation
from rollout_server.core.machine import Machine
from rollout_server.core.record import Answered, Asked, CaptureSettled, Forked, Masked, Record
from rollout_server.core.segment import SegmentKind

UNSEEN: Final = "the server was restarted, and nothing shows that the agent received this completion"


def unreceived(machine: Machine, records: Sequence[Record]) -> Sequence[int]:
    """Return the turns to mask out: the last completion of each conversation that no call continued.

    Empty if the calls were settled by their end, or the agent does not own its loop. `records` is the log, which the machine has.
    """
    owns_loop = any(isinstance(record, Forked) and record.origin.kind is SegmentKind.MAIN for record in records)
    if not owns_loop or are_settled(records):
        return ()
    last, seen = dict[Conversation, int](), set[int]()
    for record in records:
        match record:
            case Asked(turn=turn):
                seen.add(last.get(machine.of_turn(turn), 0))
            case Answered(turn=turn):
                last[machine.of_turn(turn)] = turn
            case Forked(after_turn=turn) | Masked(turn=turn):
                seen.add(turn)
    return [turn for turn in sorted(set(last.values()) - seen) if machine.has_completed(turn)]


def are_settled(records: Sequence[Record]) -> bool:
    """Return whether the calls were counted, perhaps by an earlier process, and there was none since."""
    latest = (record for record in reversed(records) if isinstance(record, Asked | CaptureSettled))
    return isinstance(next(latest, None), CaptureSettled)
