"""What is to be done for a model call of an agent that owns its loop. `CallTree.decide` decides it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from rollout_server.core.capture.history_tree import CallPlan, Pending
from rollout_server.core.capture.report import CaptureReport
from rollout_server.core.message import JSON
from rollout_server.core.segment import Parting, SegmentKind

Messages: TypeAlias = "tuple[Mapping[str, JSON], ...]"


@dataclass(frozen=True, slots=True)
class Continue:
    """Append the messages to the conversation and sample."""

    conversation: int
    messages: Messages
    plan: CallPlan = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Branch:
    """Branch from the conversation after one of its turns, append the messages and sample.

    Args:
        conversation: the conversation to branch from.
        after_turn: the number of the turn in the rollout.
        messages: the messages that follow the turn.
        parting: where the call parted from the conversation.
        auxiliary: the call is beside the task: its answer does not train.
    """

    conversation: int
    after_turn: int
    messages: Messages
    parting: Parting
    plan: CallPlan = field(repr=False, compare=False)
    auxiliary: bool = False


@dataclass(frozen=True, slots=True)
class Open:
    """Open a conversation with the messages as its prompt, and sample.

    Args:
        kind: MAIN for the first conversation that is not beside the task; then SUBAGENT, COMPACTION or DRIFT.
        messages: its prompt.
        parting: where the call parted from the closest conversation; None if the tree has no conversation yet.
        auxiliary: the conversation is beside the task: it does not train.
    """

    kind: SegmentKind
    messages: Messages
    parting: Parting | None
    auxiliary: bool
    plan: CallPlan = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Replay:
    """Return the completion of an earlier, equal call. Nothing is sampled."""

    completion_id: str


@dataclass(frozen=True, slots=True)
class Delivering:
    """Decide again once this completion of an equal call was confirmed, at the latest after `seconds`: it may be on its way."""

    completion_id: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Join:
    """Wait for the completion of an equal call."""

    pending: Pending


@dataclass(frozen=True, slots=True)
class FixedReply:
    """Return this text: the call is beside the task. Nothing is sampled, and nothing of the call is in a sample.

    `number` counts the fixed replies of the rollout, from 1.
    """

    text: str
    number: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Refuse the call.

    Args:
        reason: `INVALID_CALL`, `UNKNOWN_COMPLETION` or `HOSTED_TOOL`.
        field: the path of the field of `ModelCall`, such as `messages[3].content[0].type`.
        text: what was wrong and what to do.
    """

    reason: str
    field: str
    text: str


Decision: TypeAlias = "Continue | Branch | Open | Replay | Delivering | Join | FixedReply | Refuse"

INVALID_CALL = "INVALID_CALL"
UNKNOWN_COMPLETION = "UNKNOWN_COMPLETION"
HOSTED_TOOL = "HOSTED_TOOL"


@dataclass(frozen=True, slots=True)
class Settlement:
    """What the end of a capture decides.

    Args:
        main: the conversation whose messages are those of the outcome; None: no completion belongs to the task.
        masked: turns of the rollout that do not train, and why: "auxiliary" or "abandoned".
        report: counts of the calls.
    """

    main: int | None
    masked: tuple[tuple[int, str], ...]
    report: CaptureReport
