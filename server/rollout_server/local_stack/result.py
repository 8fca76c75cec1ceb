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
        uid: the server's id of the rollout.
        messages: the conversation, as OpenAI-style dictionaries.
        reward: the value that the agent's `reward` returned; None if there was none.
        scores: named components of the reward.
        stop: why it completed: "stop", "max_turns" or a reason that the agent chose; None if it failed or was cancelled.
        failure: why it failed or was cancelled; None if it completed.
        warnings: warnings about its tokens, for humans.
        samples: its training samples, one per segment.
        events: its events, in order.
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
        """The text of the last completion; empty if it has none."""
        completions = [message["content"] for message in self.messages if message["role"] == "assistant"]
        return completions[-1] if completions and isinstance(completions[-1], str) else ""

    @property
    def tool_results(self) -> Sequence[Any]:
        """The result of each tool call as the model read it, in order: a text, or content parts if a tool returned an image."""
        return [message["content"] for message in self.messages if message["role"] == "tool"]


def finished_rollout(rollout: Rollout, events: Sequence[RolloutEvent]) -> FinishedRollout:
    """Return the finished rollout with its samples and events."""
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
    """Return how the strict trainer's verdict differs from the server's sample, for humans; empty if they agree."""
    if verdict is None:  # the agent requested no completion
        return ""
    if verdict.refusals:
        return "; ".join(refusal.text for refusal in verdict.refusals)
    own = [sample for sample in finished.samples if not sample.model]  # the trainer does not see the others
    if len(own) != 1:  # the verdict of the rollout id covers only one of several conversations
        return ""
    expected, (sample,) = verdict.sample, own
    mask = tuple(sample.response_mask)
    # Tokens that the agent masked out have mask 1 in the trainer, which gets that mask only with the outcome.
    if any(event.HasField("masked") for event in finished.events):
        mask = tuple(own or train for own, train in zip(mask, expected.response_mask, strict=False))
    same = tuple(sample.response_ids) == expected.response_ids and mask == expected.response_mask
    return "" if same else "the server's sample differs from the trainer's in its tokens or its mask"
