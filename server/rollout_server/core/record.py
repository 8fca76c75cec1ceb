"""Records: the inputs of a rollout's machine, in order (D1).

An event is the view of a record, and its sequence number is the record's place in the log, from 1. `Asked` and `ToolStarted`
are also intents: records that wait for their result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from rollout_server.core.ledger import Drift, Logprobs, Origin, Prediction, Tokens
from rollout_server.core.message import Message, ToolCall
from rollout_server.core.outcome import End, RewardResult
from rollout_server.core.segment import Plane
from rollout_server.core.spec import Sampling

RESAMPLED: Final = "resampled"
"""The code of notes and warnings on a turn that may have been generated more than once (D8)."""

FIRST: Final = "0"
"""The segment that a rollout begins with. Any segment that a conversation had stands for the conversation."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The rollout was accepted."""

    messages: int
    agent: str
    agent_version: str


@dataclass(frozen=True, slots=True)
class Asked:
    """A completion is wanted. `turn_key` stays the same on each attempt; `messages` counts the conversation.

    `sampling` is how the model samples in this turn, whole; None: as the rollout's spec says.
    """

    turn: int
    segment_id: str
    turn_key: str
    messages: int
    sampling: Sampling | None = None


@dataclass(frozen=True, slots=True)
class Answered:
    """The trainer answered the open `Asked`.

    Args:
        message: the answer, verbatim.
        finish_reason: the trainer's word; empty: none.
        token_ids: the sampled tokens; None where the trainer sends none.
        logprobs: as long as `token_ids`; None: unknown.
        predicted: what our rendering expected to stand before the answer.
        reported: the prompt as the trainer reports it, without its first `shared` tokens; None: it reports none.
        shared: tokens at the start of the prompt that equal the segment so far; the machine leaves them out of the log, which
            would otherwise grow with the square of the turns.
        mask_length: length of the mask that was sent; None: none was.
        attempts: requests that were sent.
        elapsed_ms: from the first request to the answer.
        usage: prompt and completion tokens as the trainer counts them, where it sends no ids.
        policy_version: the policy that answered, in the trainer's words.
        notes: what the edge noticed about the answer, as (code, text).
        tool_calls: how many calls the answer holds.
        planes: what came beside the sampled tokens.
        extra_json: further fields of the trainer's, one JSON object, or empty.
        around: text around the place where the reported prompt parts from what was expected: ours, then the trainer's. Both
            are empty where it does not, or where nobody can tell.
    """

    turn: int
    message: Message
    finish_reason: str
    token_ids: Tokens | None
    logprobs: Logprobs | None = None
    predicted: Prediction | None = None
    reported: Tokens | None = None
    shared: int = 0
    mask_length: int | None = None
    attempts: int = 1
    elapsed_ms: float = 0.0
    usage: tuple[int, int] | None = None
    policy_version: str = ""
    notes: tuple[tuple[str, str], ...] = ()
    tool_calls: int = 0
    around: tuple[str, str] = ("", "")
    planes: tuple[Plane, ...] = ()
    extra_json: str = ""


@dataclass(frozen=True, slots=True)
class Appended:
    """The agent added messages to a conversation."""

    messages: tuple[Message, ...]
    segment_id: str = FIRST


@dataclass(frozen=True, slots=True)
class ToolStarted:
    """A tool call is to run. `index` is its place among the calls of the turn, from 0."""

    turn: int
    index: int
    call: ToolCall
    segment_id: str = FIRST


@dataclass(frozen=True, slots=True)
class ToolReturned:
    """A tool call ended with a message for the model; `failed` says that it is an error text."""

    turn: int
    index: int
    call: ToolCall
    message: Message
    failed: bool
    elapsed_ms: float = 0.0
    segment_id: str = FIRST


@dataclass(frozen=True, slots=True)
class Forked:
    """The agent opened a conversation.

    Args:
        segment_id: its own.
        of: the segment of the conversation that was forked.
        origin: where its first segment comes from, as far as that is known before its first prompt.
        count: how many messages it begins with.
        messages: those that the agent gave; none for a branch, which has those of the conversation that was forked.
        tools: the names of those that its model is told.
    """

    segment_id: str
    of: str
    origin: Origin
    count: int
    messages: tuple[Message, ...] = ()
    tools: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The agent stopped waiting for the open `Asked` of a conversation that it had forked, which is closed with it."""

    turn: int
    segment_id: str


@dataclass(frozen=True, slots=True)
class Observed:
    """The agent took something from the world beside its trainer and tools. A replay is told the same.

    Args:
        what: "now", "random" or "once".
        value_json: what it was: a time in ISO 8601, a seed, or the result of the agent's function.
        segment_id: of the conversation whose `Run` was asked.
    """

    what: str
    value_json: str
    segment_id: str = FIRST


@dataclass(frozen=True, slots=True)
class Masked:
    """The author takes what the model wrote in a turn out of the training. `reason` is for a person."""

    turn: int
    reason: str


@dataclass(frozen=True, slots=True)
class SegmentOpened:
    """A segment began. Follows from an `Answered`."""

    turn: int
    segment_id: str
    origin: Origin
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class DriftFound:
    """The trainer's prompt is not what was expected. Follows from an `Answered`, whose `around` it has."""

    turn: int
    segment_id: str
    drift: Drift
    around: tuple[str, str] = ("", "")

    @property
    def text(self) -> str:
        """What was found, for a person."""
        drift, (ours, theirs) = self.drift, self.around
        text = f"turn {self.turn}: the trainer's prompt parts from ours at token {drift.index} ({drift.kind.value})"
        return f"{text}: expected {ours!r}, reported {theirs!r}" if ours or theirs else text


@dataclass(frozen=True, slots=True)
class Note:
    """The agent or the server remarks something. `code` is a stable word."""

    turn: int
    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The rollout ends. Always the last record. Times in milliseconds."""

    end: End
    reward_result: RewardResult = RewardResult()
    total_ms: float = 0.0
    queued_ms: float = 0.0


Deed: TypeAlias = "Forked | GivenUp | Observed | Masked"
"""What an agent does beside turns and tool calls."""

Input: TypeAlias = "Accepted | Asked | Answered | Appended | ToolStarted | ToolReturned | Deed | Note | Ended"
Consequence: TypeAlias = "SegmentOpened | DriftFound"
Record: TypeAlias = "Input | Consequence"
