"""How rollouts end: the one terminal value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from rollout_server.core.ledger import Segment
from rollout_server.core.message import Message


class Category(Enum):
    """What kind of thing went wrong."""

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
    """The rollout came to its end. `reason` is "stop", "max_turns", "max_tokens", "max_bytes" or an agent's own word."""

    reason: str
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """The rollout went wrong. The message says what was wrong, where, and what to do; it shows none of our insides."""

    category: Category
    message: str
    turn: int = 0
    http_status: int | None = None


@dataclass(frozen=True, slots=True)
class Cancellation:
    """Somebody ended the rollout."""

    reason: str


End: TypeAlias = "Stop | Failure | Cancellation"


@dataclass(frozen=True, slots=True)
class Warned:
    """Something that did not end the rollout but that its user should know. `code` is a stable word."""

    code: str
    message: str
    turn: int
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Metrics:
    """What a rollout used; times in milliseconds, see `Metrics` in the contract."""

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
    """What the agent says of a rollout that came to its end."""

    reward: float | None = None
    scores: Mapping[str, float] | None = None
    extra_json: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The one terminal value of a rollout: always with messages, ledger and metrics so far."""

    end: End
    messages: tuple[Message, ...]
    segments: tuple[Segment, ...]
    metrics: Metrics
    reward_result: RewardResult
    warnings: tuple[Warned, ...]
