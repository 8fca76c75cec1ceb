"""The outcome: how a rollout ended and its results."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final, TypeAlias

from rollout_server.core.capture.report import CaptureReport
from rollout_server.core.ledger import Segment
from rollout_server.core.message import Message
from rollout_server.core.segment import Author, SamplePart


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


class FailureClass(Enum):
    """Who has to act on a failure, and whether its samples train. `FailureClass` in the proto file describes the values."""

    POLICY = "policy"
    ENVIRONMENT = "environment"
    TOOL = "tool"
    ENGINE = "engine"
    TRAINER = "trainer"
    SERVER = "server"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"


POSSIBLE_CLASSES: Final[Mapping[Category, tuple[FailureClass, ...]]] = MappingProxyType(
    {
        Category.TOKENIZER: (FailureClass.SERVER,),
        Category.NETWORK: (FailureClass.TRAINER, FailureClass.ENGINE),
        Category.RATE_LIMITED: (FailureClass.TRAINER, FailureClass.ENGINE),
        Category.TRAINER_SERVER: (FailureClass.TRAINER,),
        Category.TRAINER_CLIENT: (FailureClass.TRAINER,),
        Category.TOOL: (FailureClass.TOOL,),
        Category.VALIDATION: (
            FailureClass.TRAINER,
            FailureClass.ENGINE,
            FailureClass.ENVIRONMENT,
            FailureClass.POLICY,
        ),
        Category.INTERNAL: (FailureClass.ENVIRONMENT, FailureClass.SERVER),
        Category.TIMEOUT: (FailureClass.DEADLINE, FailureClass.TRAINER, FailureClass.ENGINE),
        Category.INTERRUPTED: (FailureClass.SERVER,),
        Category.TOKEN_DRIFT: (FailureClass.TRAINER, FailureClass.ENGINE),
        Category.NOT_REPLAYABLE: (FailureClass.ENVIRONMENT,),
        Category.ENGINE_SERVER: (FailureClass.ENGINE,),
        Category.ENGINE_CLIENT: (FailureClass.ENGINE,),
    }
)
"""The classes of each category. If there are several, the place that creates the `Failure` names one as its `source`."""

TRAIN_BY_DEFAULT: Final = frozenset({FailureClass.POLICY, FailureClass.DEADLINE})
"""The classes whose samples train if the request says nothing else."""


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
        source: the class of the failure; None if the category leaves no choice (`POSSIBLE_CLASSES`).
    """

    category: Category
    message: str
    turn: int = 0
    http_status: int | None = None
    source: FailureClass | None = None

    @property
    def failure_class(self) -> FailureClass:
        """Who has to act. An ambiguous category without a `source` is a bug of this server, so its class is SERVER."""
        possible = POSSIBLE_CLASSES[self.category]
        return self.source or (possible[0] if len(possible) == 1 else FailureClass.SERVER)


@dataclass(frozen=True, slots=True)
class Cancellation:
    """The rollout was cancelled by a caller."""

    reason: str


End: TypeAlias = "Stop | Failure | Cancellation"


def failure_class_of(end: End) -> FailureClass | None:
    """Return the class of an end; None for a rollout that completed."""
    if isinstance(end, Stop):
        return None
    return FailureClass.CANCELLED if isinstance(end, Cancellation) else end.failure_class


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
        roles: up to 1,000 finite numbers by role, such as `{"agent": 1.0, "critic": 0.5}`, for the samples of each role. Needs
            `reward_rule = "own"`. A role without a conversation in the rollout is ignored.
    """

    reward: float | None = None
    scores: Mapping[str, float] | None = None
    extra_json: str = ""
    roles: Mapping[str, float] | None = None


class RewardRule(Enum):
    """How the rewards of a rollout reach its samples. `RewardRule` in the proto file describes the values."""

    COPY = "copy"
    SPLIT = "split"
    OWN = "own"


@dataclass(frozen=True, slots=True)
class TurnReward:
    """The reward of one turn.

    Args:
        turn: the turn, from 1.
        value: the sum of what the agent gave the turn.
        segment_id: the segment that holds the turn's completion; empty if the tokens of the turn are unknown.
    """

    turn: int
    value: float
    segment_id: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The single terminal value of a rollout, always with the messages, ledger and metrics so far.

    `capture` says what the calls of an agent that owns its loop were; None for any other agent. `policy_step` is the newest step
    that was announced for the rollout or that sampled one of its tokens; None if none is known.
    """

    end: End
    messages: tuple[Message, ...]
    segments: tuple[Segment, ...]
    metrics: Metrics
    reward_result: RewardResult
    warnings: tuple[Warned, ...]
    turn_rewards: tuple[TurnReward, ...] = ()
    reward_rule: RewardRule = RewardRule.COPY
    capture: CaptureReport | None = None
    policy_step: int | None = None


def training_verdict(outcome: Outcome, part: SamplePart, train_on: Collection[FailureClass] | None) -> tuple[bool, str]:
    """Return whether a sample trains, and why not: a stable word, empty if it trains.

    Args:
        outcome: the rollout's outcome.
        part: the sample's part of a segment.
        train_on: the classes whose samples train, by the request; None: `TRAIN_BY_DEFAULT`.
    """
    reason = "" if may_train(outcome.end, train_on) else _end_reason(outcome.end)
    reason = reason or _untrainable_reason(part)
    return not reason, reason


def may_train(end: End, train_on: Collection[FailureClass] | None) -> bool:
    """Return whether the samples of a rollout that ended like this train. `train_on` is described at `training_verdict`."""
    failed = failure_class_of(end)
    return failed is None or failed in (TRAIN_BY_DEFAULT if train_on is None else train_on)


def longest_share(segments: Collection[Segment]) -> float:
    """Return the trained tokens of the longest segment divided by all trained tokens; 0 without any."""
    trained = [sum(span.stop - span.start for span in each.spans if span.trains) for each in segments]
    return max(trained, default=0) / (sum(trained) or 1)


def _end_reason(end: End) -> str:
    return f"failure_{end.failure_class.value}" if isinstance(end, Failure) else "cancelled"


def _untrainable_reason(part: SamplePart) -> str:
    if not part.segment.role.trainable:
        return "role_not_trainable"
    if not any(span.trains for span in part.response):
        return "no_trained_tokens"
    return "stale" if part.stale else ""


def segment_rewards(outcome: Outcome) -> Mapping[str, float]:
    """Return the reward of each segment by its id, as if each were one sample. A segment without a reward is missing."""
    rewards = sample_rewards(outcome, [SamplePart.whole(each) for each in outcome.segments])
    return {part.segment.id: reward for part, reward in rewards.items()}


def sample_rewards(outcome: Outcome, parts: Sequence[SamplePart]) -> Mapping[SamplePart, float]:
    """Return the rewards of a rollout's samples according to the rule. A sample without a reward is missing.

    Only a sample that trains has a reward, and none has one in a rollout that was not judged because it failed or was cancelled.
    """
    if not isinstance(outcome.end, Stop):
        return {}
    result, trained = outcome.reward_result, [each for each in parts if not _untrainable_reason(each)]
    if outcome.reward_rule is RewardRule.OWN:
        given = _own_rewards(outcome, parts)
        return {part: math.fsum(given[part]) for part in trained if given[part]}
    if result.reward is None:
        return {}
    shares = max(1, len(trained)) if outcome.reward_rule is RewardRule.SPLIT else 1
    return dict.fromkeys(trained, result.reward / shares)


def _own_rewards(outcome: Outcome, parts: Sequence[SamplePart]) -> Mapping[SamplePart, list[float]]:
    """Return what was given to the turns of each part and to its role.

    The reward of a turn in several parts is that of the last one that is not stale; without tokens, of the last in its segment.
    """
    holders: dict[tuple[str, int], SamplePart] = {}
    for part in parts:
        turns = {span.turn for span in part.response if span.author is Author.MODEL} | {0}
        for key in ((part.segment.id, turn) for turn in turns):
            if not part.stale or key not in holders:
                holders[key] = part
    given, roles = defaultdict[SamplePart, list[float]](list), outcome.reward_result.roles or {}
    for each in outcome.turn_rewards:
        holder = holders.get((each.segment_id, each.turn)) or holders.get((each.segment_id, 0))
        if holder is not None:
            given[holder].append(each.value)
    for part in parts:
        if part.segment.role.name in roles:
            given[part].append(roles[part.segment.role.name])
    return given


def summary_of(outcome: Outcome) -> str:
    """Return one line about an outcome, for logs. It contains no messages, tokens or keys."""
    end, metrics = outcome.end, outcome.metrics
    what: dict[str, object] = {
        "end": type(end).__name__.lower(),
        "turns": metrics.turns,
        "tool_calls": metrics.tool_calls,
    }
    if isinstance(end, Failure):
        what |= {"category": end.category.value}
    what |= {
        "generated_tokens": metrics.generated_tokens,
        "warnings": len(outcome.warnings),
        "ms": round(metrics.total_ms),
    }
    return " ".join(f"{key}={value}" for key, value in what.items())
