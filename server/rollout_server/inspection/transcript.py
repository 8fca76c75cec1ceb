"""A rollout as it is looked at: segments of runs, each of one author, and where the trainer's prompts diverge from ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from osmosis.rollout.v1 import outcome_pb2, rollout_service_pb2, token_pb2
from rollout_client.samples import AUTHORS, MASK_REASONS, SEGMENT_KINDS, samples

_UNKNOWN = "unspecified"
_DRIFT = "token_drift"
_WINDOW = 12


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Tokens of one author and one turn.

    Args:
        letter: M the model, P the prompt, E the environment, C a closing token, A the model's but masked out by the agent's
            author, ? not told.
        author: "model" or "other".
        reason: why they do not train, by the contract's name; None: they do.
        turn: from 1.
        start: of the first token, counted from the start of the segment.
        ids: token ids, at least one.
        logprobs: one natural logarithm for each id; None: not known.
        policy_version: the policy that sampled them, as the trainer names it; empty: unknown.
        planes: what the trainer sent beside them: names and element types.
    """

    letter: str
    author: str
    reason: str | None
    turn: int
    start: int
    ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    policy_version: str
    planes: tuple[tuple[str, str], ...] = ()

    @property
    def stop(self) -> int:
        """Behind the last token."""
        return self.start + len(self.ids)


@dataclass(frozen=True, slots=True)
class TranscriptDrift:
    """At token `index` the prompt of `turn` is not what was expected. `was` and `here`: the tokens from there on, where known."""

    index: int
    turn: int
    message: str
    was: tuple[int, ...] | None
    here: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TranscriptSegment:
    """A segment: all its tokens, how many train and how many the author masked, and the runs and drifts that are looked at."""

    id: str
    kind: str
    parent_id: str
    parent_tokens: int
    verified: bool
    ids: tuple[int, ...]
    trained: int
    masked: int
    runs: tuple[TokenRun, ...]
    drifts: tuple[TranscriptDrift, ...] = ()


@dataclass(frozen=True, slots=True)
class Transcript:
    """A finished rollout. `segments` are those that are looked at."""

    rollout: rollout_service_pb2.Rollout
    segments: tuple[TranscriptSegment, ...]

    @property
    def outcome(self) -> outcome_pb2.Outcome:
        """How it ended."""
        return self.rollout.outcome

    def select(self, segment: str | None, turn: int | None) -> Transcript:
        """The part of one segment, of one turn, or both. Raises ValueError where there is none."""
        known = [each.id for each in self.segments]
        if segment is not None and segment not in known:
            raise ValueError(f"there is no segment {segment!r}; there are {', '.join(known) or 'none'}")
        left = [each for each in self.segments if segment in (None, each.id)]
        turns = sorted({run.turn for each in left for run in each.runs})
        if turn is not None and turn not in turns:
            raise ValueError(f"no tokens of turn {turn} are here; there are turns {_ranges(turns) or 'none'}")
        selected = [each if turn is None else _of_turn(each, turn) for each in left]
        return replace(self, segments=tuple(each for each in selected if each.runs))


def transcript_of(rollout: rollout_service_pb2.Rollout) -> Transcript:
    """What there is to see of a rollout in view "full".

    Raises ValueError for one that has not finished, that was read in a lesser view, or that contradicts itself.
    """
    if not rollout.HasField("outcome"):
        raise ValueError("the rollout has not finished: its tokens are told once it has")
    outcome = rollout.outcome
    samples(rollout)
    if outcome.samples and not outcome.segments:
        raise ValueError('the rollout tells no segments, only samples: read it again in view "full"')
    found = [_segment(segment) for segment in outcome.segments]
    return Transcript(rollout, tuple(_with_drifts(each, found, outcome.warnings) for each in found))


def _segment(segment: token_pb2.Segment) -> TranscriptSegment:
    starts = accumulate((len(span.token_ids) for span in segment.spans), initial=0)
    runs = tuple(_run(span, start, segment.id) for span, start in zip(segment.spans, starts, strict=False))
    origin = segment.origin
    kind = SEGMENT_KINDS.get(origin.kind, _UNKNOWN)
    ids = tuple(token for run in runs for token in run.ids)
    trained, masked = (sum(len(run.ids) for run in runs if run.letter == letter) for letter in "MA")
    return TranscriptSegment(
        segment.id, kind, origin.parent_id, origin.parent_tokens, segment.verified, ids, trained, masked, runs
    )


def _run(span: token_pb2.Span, start: int, segment_id: str) -> TokenRun:
    author = AUTHORS.get(span.author, _UNKNOWN)
    reason = MASK_REASONS.get(span.mask_reason, _UNKNOWN) if span.mask_reason else None
    logprobs = tuple(span.logprobs.values) if span.HasField("logprobs") else None
    if logprobs is not None and len(logprobs) != len(span.token_ids):
        raise ValueError(f"segment {segment_id!r}, token {start}: there are not as many logprobs as tokens")
    return TokenRun(
        _letter(author, reason),
        author,
        reason,
        span.turn,
        start,
        tuple(span.token_ids),
        logprobs,
        span.policy_version,
        tuple((plane.name, plane.dtype) for plane in span.planes),
    )


def _letter(author: str, reason: str | None) -> str:
    if author == "model":
        return {None: "M", "author": "A"}.get(reason, "?")
    return {"prompt": "P", "environment": "E", "closing": "C"}.get(reason or "", "?")


def _with_drifts(
    segment: TranscriptSegment, others: Sequence[TranscriptSegment], warnings: Sequence[outcome_pb2.Warning]
) -> TranscriptSegment:
    """A warning belongs to the segment that its turn is in; the one that opened a segment tells both sides."""
    turns = {run.turn for run in segment.runs}
    opened = segment.runs[0].turn if segment.kind == "drift" and segment.runs else None
    parent = next((each.ids for each in others if each.id == segment.parent_id), None)
    found = [
        _drift(segment, each, parent if each.turn == opened else None)
        for each in warnings
        if each.code == _DRIFT and each.turn in turns and each.HasField("index")
    ]
    if opened is not None and all(each.turn != opened for each in found):
        silent = outcome_pb2.Warning(turn=opened, index=segment.parent_tokens)
        found.append(_drift(segment, silent, parent))
    return replace(segment, drifts=tuple(sorted(found, key=lambda drift: drift.index)))


def _drift(segment: TranscriptSegment, warning: outcome_pb2.Warning, parent: Sequence[int] | None) -> TranscriptDrift:
    index = min(warning.index, len(segment.ids))
    window = slice(index, index + _WINDOW)
    was = None if parent is None else tuple(parent[window])
    return TranscriptDrift(index, warning.turn, warning.message, was, segment.ids[window])


def _of_turn(segment: TranscriptSegment, turn: int) -> TranscriptSegment:
    runs = tuple(run for run in segment.runs if run.turn == turn)
    return replace(segment, runs=runs, drifts=tuple(drift for drift in segment.drifts if drift.turn == turn))


def _ranges(turns: Sequence[int]) -> str:
    """1, 2, 3, 7 as "1-3, 7"."""
    found: list[list[int]] = []
    for turn in turns:
        if found and turn == found[-1][1] + 1:
            found[-1][1] = turn
        else:
            found.append([turn, turn])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)
