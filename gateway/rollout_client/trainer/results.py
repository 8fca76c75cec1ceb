"""Prompts, and results of `Trainer.rollouts`: finished rollouts with their samples, in groups."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from osmosis.rollout.v1.rollout_service_pb2 import Rollout

from rollout_client.chat_messages import messages
from rollout_client.samples import MODEL, TrainingSample, failure_class_of, raise_for_failure, samples
from rollout_client.spec import MessageLike
from rollout_client.trainer.rollout_records import Record
from rollout_client.trainer.verify import Mismatch, find_mismatch

_LOG: Final = logging.getLogger("rollout_client")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prompt of a group of rollouts.

    Args:
        messages: the conversation so far, as for `Client.start`.
        group_id: id of the group; empty: a random id.
        metadata: values for agents and tools, such as the ground truth for a reward function.
    """

    messages: Sequence[MessageLike]
    group_id: str = ""
    metadata: Mapping[str, Any] | None = None


PromptLike: TypeAlias = str | Sequence[MessageLike] | Prompt
"""A prompt: a `Prompt`, a list of messages, or the text of a single user message."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished rollout.

    Args:
        rollout: the rollout with its outcome, as the server delivered it.
        samples: training samples, usually one, also those of further models; `own` has only those of the trainer's own model.
            Empty on a mismatch.
        untrainable: samples that must not be trained on: their rollout failed or was cancelled (`train_on` of the request decides),
            or their role does not train. Their `untrainable_reason` says why.
        mismatch: first difference between the server's samples and the tokens that this trainer generated. None: they are equal.
        checked: every token of the samples was compared. False if part of the ledger came from the server: after a restart of
            either side, if more rollouts ran than `remembered`, or if a sample of a further model trains.
    """

    rollout: Rollout = field(repr=False)
    samples: Sequence[TrainingSample] = field(repr=False)
    mismatch: Mismatch | None
    checked: bool
    untrainable: Sequence[TrainingSample] = field(default=(), repr=False)

    @property
    def own(self) -> Sequence[TrainingSample]:
        """Those of `samples` that the trainer's own model generated. The others train the further model in their `model`."""
        return _own(self.samples)

    @property
    def own_untrainable(self) -> Sequence[TrainingSample]:
        """Those of `untrainable` that the trainer's own model generated."""
        return _own(self.untrainable)

    @property
    def primary(self) -> TrainingSample | None:
        """The sample for a trainer that takes one row per rollout: of `own` the one with the most trained tokens.

        Of equals, the earliest segment. None: no sample of the trainer's own model trains.
        """
        return max(self.own, key=lambda sample: sum(sample.response_mask), default=None)

    @property
    def uid(self) -> str:
        """The server's id of the rollout."""
        return self.rollout.uid

    @property
    def group_id(self) -> str:
        """Id of the rollout's group."""
        return self.rollout.spec.group_id

    @property
    def reward(self) -> float | None:
        """Reward that the agent gave the rollout. None: none, as for every rollout that failed or was cancelled; it is not 0."""
        outcome = self.rollout.outcome
        return outcome.reward if outcome.HasField("reward") else None

    @property
    def end(self) -> str:
        """How the rollout ended: "stop", "failure" or "cancellation"."""
        return self.rollout.outcome.WhichOneof("end") or ""

    @property
    def error(self) -> str:
        """Error message of a failed rollout; otherwise empty."""
        return self.rollout.outcome.failure.message

    @property
    def failure_class(self) -> str:
        """Who has to act if the rollout failed, such as "engine"; "cancelled" for a cancelled one, empty if it completed."""
        return failure_class_of(self.rollout.outcome)

    def raise_for_failure(self) -> None:
        """Raise `RolloutFailed` if the rollout failed or was cancelled."""
        raise_for_failure(self.rollout)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The whole conversation, as dictionaries in the shape of OpenAI's chat completions API."""
        return messages(self.rollout.outcome)


@dataclass(frozen=True, slots=True)
class Group:
    """The finished rollouts of one prompt.

    Args:
        id: id of the group.
        prompt: the prompt.
        rollouts: the `n` rollouts, in the order of their indices.
    """

    id: str
    prompt: Prompt
    rollouts: Sequence[Finished]


class RecordMismatch(Exception):
    """The server's samples differ from the tokens that this trainer generated, so they must not be trained on.

    `finished` is the rollout, without samples. The text names segment, field and token index.
    """

    def __init__(self, finished: Finished) -> None:
        super().__init__(f"rollout {finished.uid!r}: {finished.mismatch}")
        self.finished = finished

    def __reduce__(self) -> tuple[object, ...]:
        """Support pickling, so that worker processes can raise this error in their parent."""
        return RecordMismatch, (self.finished,)


class FailureLog:
    """Logs failed rollouts, because a training loop may not look at them, and would only see fewer samples.

    It logs the first one of each cause, which is the class and the category of the failure.
    """

    def __init__(self) -> None:
        self._logged: set[tuple[str, int]] = set()

    def add(self, finished: Finished) -> None:
        """Log a finished rollout if it failed for a cause that no earlier one had."""
        cause = (finished.failure_class, finished.rollout.outcome.failure.category)
        if finished.end != "failure" or cause in self._logged:
            return
        self._logged.add(cause)
        _LOG.warning(
            "rollout %s failed (class %s): %s; further failures of this kind are not logged, see Finished.error",
            finished.uid,
            finished.failure_class,
            finished.error,
        )


def verify_rollout(rollout: Rollout, record: Record | None) -> Finished:
    """Compare a finished rollout with the trainer's record of it. None: the trainer has no record of it."""
    try:
        found = samples(rollout)
    except ValueError as error:
        wrong = Mismatch("", "segment", None, "consistent samples", str(error))
        return Finished(rollout, (), wrong, True)
    own = _own(found)  # this trainer did not generate the others, so it cannot verify them
    trained = [each for each in found if each.trainable]
    rest = [each for each in found if not each.trainable]
    if record is None:
        return Finished(rollout, trained, None, not found, rest)
    others = {span.turn for each in found if each.model for span in each.spans or () if span.author == MODEL}
    wrong_at = find_mismatch(record, own, turns=rollout.outcome.metrics.turns - len(others))
    checked = all(ledger.complete for _, ledger in record.ledgers()) and not any(each.model for each in trained)
    if wrong_at:
        return Finished(rollout, (), wrong_at, checked)
    return Finished(rollout, trained, None, checked, rest)


def _own(found: Sequence[TrainingSample]) -> list[TrainingSample]:
    """Return the samples that no further model generated."""
    return [sample for sample in found if not sample.model]


def iter_prompts(given: Iterable[PromptLike]) -> Iterator[PromptLike]:
    """Return an iterator of prompts. Raises TypeError for a single prompt, such as a str, whose items are not prompts."""
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise TypeError(
            f"prompts must be a list of prompts, not {type(given).__name__}: write rollouts([prompt]) for one prompt"
        )
    return iter(given)


def to_prompt(given: PromptLike) -> Prompt:
    """Convert any form of a prompt to a `Prompt`. Raises TypeError for other types."""
    if isinstance(given, Prompt):
        return given
    if isinstance(given, str):
        return Prompt([{"role": "user", "content": given}])
    if isinstance(given, bytes | Mapping) or not isinstance(given, Sequence):
        wrong = f"a prompt must be a str, a list of messages or a Prompt, not {type(given).__name__}"
        message = "; for one conversation, write rollouts([[message, ...]])" if isinstance(given, Mapping) else ""
        raise TypeError(wrong + message)
    return Prompt(given)
