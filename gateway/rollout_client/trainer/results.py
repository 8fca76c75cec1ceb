"""What comes back: finished rollouts with their samples, in groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from osmosis.rollout.v1.rollout_service_pb2 import Rollout

from rollout_client.chat_messages import messages
from rollout_client.samples import TrainingSample, samples
from rollout_client.spec import MessageLike
from rollout_client.trainer.rollout_records import Record
from rollout_client.trainer.verify import Mismatch, find_mismatch


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a group of rollouts begins with.

    Args:
        messages: the conversation so far.
        group_id: of the rollouts that are compared with each other; empty: one is made up.
        metadata: for agents and tools, such as the ground truth that a reward is computed from.
    """

    messages: Sequence[MessageLike]
    group_id: str = ""
    metadata: Mapping[str, Any] | None = None


PromptLike: TypeAlias = str | Sequence[MessageLike] | Prompt
"""A prompt, the messages of one, or the text of a single user message."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A rollout that is over.

    Args:
        rollout: as the server delivered it.
        samples: what to train on, nearly always one; empty where nothing can be trusted.
        mismatch: where the server's samples part from what was generated here; None: nowhere.
        checked: every token of the samples was compared with what was generated here. False after a restart of either side, or
            where more rollouts ran than the trainer remembers: then part of the record is the server's word.
    """

    rollout: Rollout = field(repr=False)
    samples: Sequence[TrainingSample] = field(repr=False)
    mismatch: Mismatch | None
    checked: bool

    @property
    def uid(self) -> str:
        """The server's id."""
        return self.rollout.uid

    @property
    def group_id(self) -> str:
        """Of its group."""
        return self.rollout.spec.group_id

    @property
    def reward(self) -> float | None:
        """The agent's verdict; None: it gave none."""
        outcome = self.rollout.outcome
        return outcome.reward if outcome.HasField("reward") else None

    @property
    def end(self) -> str:
        """How it ended: "stop", "failure" or "cancellation"."""
        return self.rollout.outcome.WhichOneof("end") or ""

    @property
    def error(self) -> str:
        """What went wrong, for a person; empty: nothing did."""
        return self.rollout.outcome.failure.message

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The whole conversation."""
        return messages(self.rollout.outcome)


@dataclass(frozen=True, slots=True)
class Group:
    """The finished rollouts of one prompt, in the order in which they were asked for."""

    id: str
    prompt: Prompt
    rollouts: Sequence[Finished]


class RecordMismatch(Exception):
    """The server's samples are not what was generated here, so nothing may be trained on them. `finished` is the rollout."""

    def __init__(self, finished: Finished) -> None:
        super().__init__(f"rollout {finished.uid!r}: {finished.mismatch}")
        self.finished = finished


def verify_rollout(rollout: Rollout, record: Record | None) -> Finished:
    """A rollout compared with what was kept of it; None: nothing was."""
    try:
        found = samples(rollout)
    except ValueError as error:
        wrong = Mismatch("", "segment", None, "samples that hold together", str(error))
        return Finished(rollout, (), wrong, True)
    if record is None:
        return Finished(rollout, found, None, checked=not found)
    wrong_at = find_mismatch(record, found, turns=rollout.outcome.metrics.turns)
    checked = all(ledger.complete for _, ledger in record.ledgers())
    return Finished(rollout, () if wrong_at else found, wrong_at, checked)


def to_prompt(given: PromptLike) -> Prompt:
    """A prompt in whichever form it came. Raises TypeError for none."""
    if isinstance(given, Prompt):
        return given
    if isinstance(given, str):
        return Prompt([{"role": "user", "content": given}])
    if isinstance(given, Mapping) or not isinstance(given, Sequence):
        raise TypeError(f"a prompt must be a text, a list of messages or a Prompt, not {type(given).__name__}")
    return Prompt(given)
