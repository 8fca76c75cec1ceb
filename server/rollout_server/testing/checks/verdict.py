"""Verdicts of the judge, as frozen values. All counts are tokens of the trainer's own tokenizer."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class RefusalReason(StrEnum):
    """The rule that a refused request violated."""

    MASK = "mask"
    """`response_mask` is missing, has the wrong length or type, or has a wrong value."""
    HISTORY = "history"
    """The messages do not begin with those of the previous request and its completion."""
    SHRUNK = "shrunk"
    """The messages render to fewer tokens than the previous prompt and its completion had."""
    TEMPLATE = "template"
    """The chat template rejects the messages."""
    TOKENS = "tokens"
    """The token ids of the prompt differ from the ledger, or from what the messages render to."""
    BODY = "body"
    """Another field of the body violates the protocol."""
    KEY = "key"
    """The ``Idempotency-Key`` is missing, or is not that of this turn."""
    OVER = "over"
    """A completion was requested after the rollout's outcome was delivered."""
    OUTCOME = "outcome"
    """The outcome is malformed, differs from what this trainer saw, or was delivered at the wrong time."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """One refused request. `turn` (from 1) is the turn that it would have been; 0 for the delivery of an outcome."""

    turn: int
    reason: RefusalReason
    text: str


class RefusedError(Exception):
    """A request violates the protocol. Over HTTP this is a 422 whose detail is the refusal's text."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.text)
        self.refusal = refusal


@dataclass(frozen=True, slots=True)
class JudgedTurn:
    """One answered request.

    Args:
        number: the turn, from 1.
        prompt_tokens: length of the whole rendered prompt.
        new_tokens: number of prompt tokens after the last completion; 0 in the first turn.
        answer_tokens: number of generated tokens.
        drift: first index at which the prompt differs from the last prompt and completion; None if it extends them.
    """

    number: int
    prompt_tokens: int
    new_tokens: int
    answer_tokens: int
    drift: int | None


@dataclass(frozen=True, slots=True)
class TrainerSample:
    """The training sample that the trainer accumulates: the first prompt, then completions and environment tokens.

    `response_ids`, `response_mask` (0 or 1) and `logprobs` have equal length. For tokens that the model wrote, the mask is 1 and
    the logprob negative; for all others both are 0. The sample ends with the last completion.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    response_mask: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class DeliveredOutcome:
    """The outcome of a rollout as it was first delivered.

    Args:
        body: the parsed body.
        key: its ``Idempotency-Key``.
        deliveries: number of deliveries so far.
        answered: the status that settled it, a 2xx that was sent completely or a final 4xx; None while it may be sent again.
    """

    body: Mapping[str, Any]
    key: str
    deliveries: int
    answered: int | None

    @property
    def acknowledged(self) -> bool:
        """Whether the trainer responded with a 2xx."""
        return self.answered is not None and 200 <= self.answered < 300


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judge's findings about one rollout id (over gRPC: about one conversation, see `CompletionCall.key`).

    Args:
        faults: the trainer's deliberate failures and lies, such as ``turn 2: reset``.
        outcome: None if none was delivered.
        siblings: number of completions generated for turns that already had one; the sample contains the last one.
        replays: number of completions that were sent again instead of generated.
        earlier: verdicts of earlier rollouts under the same id, oldest first, at most `EARLIER_KEPT`.
    """

    rollout_id: str
    turns: tuple[JudgedTurn, ...]
    refusals: tuple[Refusal, ...]
    faults: tuple[str, ...]
    sample: TrainerSample
    outcome: DeliveredOutcome | None = None
    siblings: int = 0
    replays: int = 0
    earlier: tuple["Verdict", ...] = ()

    @property
    def accepted(self) -> bool:
        """Whether at least one turn was answered and none was refused."""
        return bool(self.turns) and not self.refusals

    @property
    def concluded(self) -> bool:
        """Whether exactly one outcome was delivered, was correct and was acknowledged, and no request was refused."""
        return self.outcome is not None and self.outcome.acknowledged and not self.refusals


EARLIER_KEPT = 16
