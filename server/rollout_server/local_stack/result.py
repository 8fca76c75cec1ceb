"""The result of a rollout on the local stack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollout_client import messages, samples

if TYPE_CHECKING:
    from osmosis.rollout.v1.event_pb2 import RolloutEvent
    from osmosis.rollout.v1.rollout_service_pb2 import Rollout
    from rollout_client import TrainingSample

    from rollout_server.testing.checks.verdict import Verdict


@dataclass(frozen=True, slots=True)
class FinishedRollout:
    """One finished rollout.

    Args:
        uid: the server's id of it.
        messages: the conversation, OpenAI-style dictionaries.
        reward: what the agent's `reward` returned; None: none.
        scores: named parts of it.
        stop: why it ended well: "stop", "max_turns", a word of the agent's ...; None: it failed.
        failure: why it did not; None: it did.
        warnings: about its tokens, for a person.
        samples: its training samples, one for each segment.
        events: everything that happened, in order.
    """

    uid: str
    messages: Sequence[Mapping[str, Any]]
    reward: float | None
    scores: Mapping[str, float]
    stop: str | None
    failure: str | None
    warnings: Sequence[str]
    samples: Sequence[TrainingSample]
    events: Sequence[RolloutEvent]

    @property
    def answer(self) -> str:
        """The text of the model's last message; empty: it has none."""
        completions = [message["content"] for message in self.messages if message["role"] == "assistant"]
        return completions[-1] if completions and isinstance(completions[-1], str) else ""

    @property
    def tool_results(self) -> Sequence[Any]:
        """What the model read of each call, in order; content parts where a tool returned an image."""
        return [message["content"] for message in self.messages if message["role"] == "tool"]


def finished_rollout(rollout: Rollout, events: Sequence[RolloutEvent]) -> FinishedRollout:
    """The finished rollout, with its samples and events."""
    outcome = rollout.outcome
    failure = outcome.failure.message if outcome.HasField("failure") else None
    if outcome.HasField("cancellation"):
        failure = f"cancelled: {outcome.cancellation.reason}"
    return FinishedRollout(
        rollout.uid,
        messages(outcome),
        outcome.reward if outcome.HasField("reward") else None,
        dict(outcome.scores),
        outcome.stop.reason if outcome.HasField("stop") else None,
        failure,
        [warning.message for warning in outcome.warnings],
        samples(outcome),
        events,
    )


def objections(finished: FinishedRollout, verdict: Verdict | None) -> str:
    """Where the strict trainer's record differs from the server's, for a person; empty: nowhere."""
    if verdict is None:  # the agent sampled nothing
        return ""
    if verdict.refusals:
        return "; ".join(refusal.text for refusal in verdict.refusals)
    if len(finished.samples) != 1:  # further segments are conversations of their own
        return ""
    theirs, (ours,) = verdict.sample, finished.samples
    mask = tuple(ours.response_mask)
    if any(event.HasField("masked") for event in finished.events):  # by the agent: trainers hear of it at the end only
        mask = tuple(own or train for own, train in zip(mask, theirs.response_mask, strict=False))
    same = tuple(ours.response_ids) == theirs.response_ids and mask == theirs.response_mask
    return "" if same else "the trainer's tokens or mask are not those of the server's sample"
