"""The age of tokens: which are too old to train, and what happens to them when the rollout ends.

The lag of a token is the newest policy step that is known at the end of the rollout, minus the step that sampled the token. It
follows from the log alone: `Ended` holds the newest step that was announced, and each `Answered` the steps of its tokens. Tokens
of further models have steps of their own, which are not compared with those of the policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from rollout_server.core.outcome import Warned
from rollout_server.core.record import Answered
from rollout_server.core.segment import Author, Role, SamplePart, Segment
from rollout_server.core.spec import StaleAction, Staleness

MOST_PARTS: Final = 64
"""Maximum samples of a segment. Each later one repeats the tokens before it as its prompt."""


class PolicySteps:
    """The policy steps of a rollout so far.

    Attributes:
        oldest: the lowest step of the tokens that train; None if it is unknown.
        newest: the highest step that sampled a completion; None if it is unknown.
    """

    def __init__(self) -> None:
        self.oldest: int | None = None
        self.newest: int | None = None

    def add(self, completion: Answered, role: Role, *, held: bool) -> None:
        """Add a completion of a conversation with this role. `held`: the ledger holds its tokens."""
        if role.model:
            return
        sampled = [run.step for run in completion.policy_runs if run.step is not None]
        self.newest = newest_step(self.newest, completion.policy_step, *sampled)
        if held and role.trainable:
            self.oldest = min(sampled if self.oldest is None else (self.oldest, *sampled), default=None)

    def mask(self, segments: Iterable[Segment]) -> None:
        """Find the oldest step again, after the tokens of a turn were masked out."""
        steps = [
            span.policy_step
            for segment in segments
            for span in segment.spans
            if segment.role.trainable and not segment.role.model and span.trains and span.policy_step is not None
        ]
        self.oldest = min(steps, default=None)


def newest_step(*steps: int | None) -> int | None:
    """Return the highest of the steps that are known."""
    return max((step for step in steps if step is not None), default=None)


def mask_stale(segments: Iterable[Segment], staleness: Staleness | None, newest: int | None) -> list[Warned]:
    """Mask the stale tokens of a rollout that ends, if the action is MASK, or if SPLIT would make too many samples.

    Returns a warning for each segment of the latter kind, and one if the step of tokens that train is unknown.
    """
    segments = [*segments]
    warnings = [] if staleness is None else [*_step_missing(segments)]
    for segment in segments:
        oldest = _oldest_fresh(segment, staleness, newest)
        if oldest is None or staleness is None or staleness.action not in (StaleAction.MASK, StaleAction.SPLIT):
            continue
        if staleness.action is StaleAction.SPLIT:
            parts = len(_split(segment, oldest))
            if parts <= MOST_PARTS:
                continue
            text = (
                f"segment {segment.id}: stale tokens would split it into {parts} samples, at most {MOST_PARTS} are made; "
                "they are masked out instead"
            )
            warnings.append(Warned("stale_masked", text, segment.spans[-1].turn))
        segment.mask_stale(oldest)
    return warnings


def sample_parts(segment: Segment, staleness: Staleness | None, newest: int | None) -> tuple[SamplePart, ...]:
    """Return the samples of a segment of a rollout that ended: one, or with SPLIT one for each stretch of one age.

    A later part begins with its first token of another age. Each generated token is in the response of exactly one part.
    """
    oldest = _oldest_fresh(segment, staleness, newest)
    if oldest is None or staleness is None or staleness.action is not StaleAction.SPLIT:
        return (SamplePart.whole(segment),)
    return _split(segment, oldest)


def _step_missing(segments: Iterable[Segment]) -> Iterator[Warned]:
    """Yield a warning about the first tokens that train, but are of any age, because their step is unknown."""
    for segment in segments:
        if segment.role.model or not segment.role.trainable:
            continue
        for span in segment.spans:
            if span.trains and span.policy_step is None:
                text = (
                    f"turn {span.turn}: the trainer sent no policy_step, so tokens of the rollout count as fresh "
                    "whatever their age"
                )
                yield Warned("policy_step_missing", text, span.turn)
                return


def _split(segment: Segment, oldest: int) -> tuple[SamplePart, ...]:
    """Return the parts. Tokens that do not train have no age and stay in the part in which they are."""
    spans, parts = segment.spans, list[SamplePart]()
    start, stop, age = spans[0].stop if spans else 0, spans[0].stop if spans else 0, None
    for span in spans:
        if span.author is not Author.MODEL:
            continue
        stale = span.is_stale(oldest)
        if span.trains and stale is not (stale if age is None else age):
            parts.append(SamplePart(segment, start, stop, len(parts), bool(age)))
            start = span.start
        age, stop = stale if span.trains else age, span.stop
    return (*parts, SamplePart(segment, start, stop, len(parts), bool(age)))


def _oldest_fresh(segment: Segment, staleness: Staleness | None, newest: int | None) -> int | None:
    """Return the lowest step that is not stale; None if no token of the segment can be."""
    if staleness is None or newest is None or segment.role.model:
        return None
    return newest - staleness.max_lag


def cancel_reason(staleness: Staleness | None, oldest: int | None, newest: int) -> str:
    """Return why a rollout is cancelled, because a token that trains is too old; empty if it is not.

    Args:
        staleness: how old its tokens may become.
        oldest: the lowest policy step of its tokens that train; None: unknown.
        newest: the highest policy step that is known to it.
    """
    if staleness is None or staleness.action is not StaleAction.CANCEL or oldest is None:
        return ""
    lag = max(oldest, newest) - oldest
    if lag <= staleness.max_lag:
        return ""
    return f"stale: the oldest token is of policy step {oldest}, {lag} behind; at most {staleness.max_lag} are allowed"
