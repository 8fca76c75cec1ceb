"""What the judge finds: frozen values, all of them counted in tokens of the trainer's own tokenizer."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class RefusalReason(StrEnum):
    """Which law a refused call broke."""

    MASK = "mask"
    """`response_mask` is missing, of the wrong length, of the wrong type or has a value that is wrong."""
    HISTORY = "history"
    """The messages do not begin with those of the call before, followed by the answer that was given."""
    SHRUNK = "shrunk"
    """The messages render to fewer tokens than the prompt before and its answer had."""
    TEMPLATE = "template"
    """The chat template does not take the messages."""
    TOKENS = "tokens"
    """The token ids that came to be continued are not what is held here and what the messages give."""
    BODY = "body"
    """Something else in the body is not what the dialect says it is."""
    KEY = "key"
    """The ``Idempotency-Key`` is missing, or is not that of this turn."""
    OVER = "over"
    """A call for a completion after the rollout's outcome was delivered."""
    OUTCOME = "outcome"
    """The outcome is not one, is not what this trainer saw, or came when it should not have come."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """One refused call; `turn` (from 1) is the turn it would have been, 0 for the delivery of an outcome."""

    turn: int
    reason: RefusalReason
    text: str


class RefusedError(Exception):
    """A call that breaks the protocol; over HTTP a 422 whose detail is the refusal's text."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.text)
        self.refusal = refusal


@dataclass(frozen=True, slots=True)
class JudgedTurn:
    """One answered call.

    `prompt_tokens` is the length of the whole rendered prompt, `new_tokens` what of it entered since the last answer
    (0 on the first turn), `answer_tokens` what was generated. `drift` is the first index at which the prompt is not the
    last prompt + answer; None where it extends them.
    """

    number: int
    prompt_tokens: int
    new_tokens: int
    answer_tokens: int
    drift: int | None


@dataclass(frozen=True, slots=True)
class TrainerSample:
    """The training sample that a trainer accumulates: the first prompt, then answers and what came between them.

    `response_ids`, `response_mask` and `logprobs` have equal length; the mask is 1 and the logprob negative exactly
    where the model wrote, else both are 0. The sample ends with the last answer.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    response_mask: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class DeliveredOutcome:
    """What a rollout came to, as it was delivered first.

    `body` as parsed, `key` its ``Idempotency-Key``, `deliveries` how often it came until now. `answered` is the status that
    settled it, a 2xx that was sent whole or a 4xx that is final; None while it may come again.
    """

    body: Mapping[str, Any]
    key: str
    deliveries: int
    answered: int | None

    @property
    def acknowledged(self) -> bool:
        """Whether it was answered with a 2xx."""
        return self.answered is not None and 200 <= self.answered < 300


@dataclass(frozen=True, slots=True)
class Verdict:
    """All that the judge knows of one rollout id (over gRPC: of one conversation, see `CompletionCall.key`).

    `faults` names the failures and lies that the trainer committed on purpose, as ``turn 2: reset``. `siblings` counts answers that
    were generated for turns that had one (the last one is in the sample), `replays` those that were given again instead.
    `outcome` is None where none was delivered. `earlier` holds the verdicts of earlier rollouts under the same id, oldest
    first and at most `EARLIER_KEPT` of them.
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
        """Whether exactly one outcome came, which was right and was acknowledged, and nothing at all was refused."""
        return self.outcome is not None and self.outcome.acknowledged and not self.refusals


EARLIER_KEPT = 16
