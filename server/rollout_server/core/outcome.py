"""The outcome: how a rollout ended and its results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from rollout_server.core.ledger import Segment
from rollout_server.core.message import Message


class Category(Enum):
    """The kind of a failure. `FailureCategory` in the proto file describes the values."""

    TOKENIZER = "tokenizer"
    NETWORK = "network"
    RATE_LIMITED = "rate_limited"
    TRAINER_SERVER = "trainer_server"
    TRAINER_CLIENT = "trainer_client"
    TOOL = "tool"
    VALIDATION = "validation"
    INTERNAL = "internal"
    TIMEOUT = "timeout"
    INTERRUPTED = "interrupted"
    TOKEN_DRIFT = "token_drift"  # noqa: S105 - a word, not a password
    NOT_REPLAYABLE = "not_replayable"
    ENGINE_SERVER = "engine_server"
    ENGINE_CLIENT = "engine_client"


@dataclass(frozen=True, slots=True)
class Stop:
    """The rollout completed.

    Args:
        reason: "stop", "max_turns", "max_tokens", "max_bytes", or the agent's reason given to `run.finish`.
        truncated: whether the last completion was cut by a length limit.
    """

    reason: str
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """The rollout failed.

    Args:
        category: the kind of failure.
        message: what was wrong, where, and what to do; without internals of the server.
        turn: the turn in which it happened; 0 before the first.
        http_status: the status that a trainer or engine answered with, if that was the cause.
    """

    category: Category
    message: str
    turn: int = 0
    http_status: int | None = None


@dataclass(frozen=True, slots=True)
class Cancellation:
    """The rollout was cancelled by a caller."""

    reason: str


End: TypeAlias = "Stop | Failure | Cancellation"


@dataclass(frozen=True, slots=True)
class Warned:
    """A problem that did not end the rollout. `code` is a stable word; `index` is a token index, if there is one."""

    code: str
    message: str
    turn: int
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Metrics:
    """Resource use of a rollout. Times are in milliseconds; the fields are described at `Metrics` in the proto file."""

    total_ms: float = 0.0
    completion_ms: float = 0.0
    tool_ms: float = 0.0
    queued_ms: float = 0.0
    turns: int = 0
    tool_calls: int = 0
    tool_failures: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    max_context_tokens: int = 0
    completion_attempts: int = 0


@dataclass(frozen=True, slots=True)
class RewardResult:
    """The reward of a rollout that completed, as `Agent.reward` returns it.

    Args:
        reward: a finite number, or None for no reward.
        scores: up to 1,000 named numbers, for example the components of the reward. Names have at most 256 characters.
        extra_json: further results as one JSON object of at most 1 MiB characters; empty for none.
    """

    reward: float | None = None
    scores: Mapping[str, float] | None = None
    extra_json: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The single terminal value of a rollout, always with the messages, ledger and metrics so far."""

    end: End
    messages: tuple[Message, ...]
    segments: tuple[Segment, ...]
    metrics: Metrics
    reward_result: RewardResult
    warnings: tuple[Warned, ...]
