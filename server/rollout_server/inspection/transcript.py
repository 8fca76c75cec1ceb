"""The transcript of a rollout: segments, runs of tokens with one author, and drift."""

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
    """Consecutive tokens with one author and one turn.

    Args:
        letter: M model, P prompt, E environment, C closing token, A model but masked by the agent, S model but stale, ? unknown.
        author: "model" or "other".
        reason: mask reason, why the tokens have mask 0; None for mask 1.
        turn: turn number, from 1.
        start: index of the first token in the segment.
        ids: token ids, at least one.
        logprobs: natural logarithm of the probability per token; None if unknown.
        policy_version: policy that sampled the tokens, as the trainer names it; empty if unknown.
        planes: name and dtype of each token plane that the trainer sent along.
        policy_step: step of the policy; None if unknown.
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
    policy_step: int | None = None

    @property
    def policy_label(self) -> str:
        """Version and step of the policy; empty if both are unknown."""
        step = f"step {self.policy_step}" if self.policy_step is not None else ""
        return f"{self.policy_version} ({step})" if self.policy_version and step else self.policy_version or step

    @property
    def stop(self) -> int:
        """Index after the last token."""
        return self.start + len(self.ids)


@dataclass(frozen=True, slots=True)
class TranscriptDrift:
    """A difference between the prompt that the trainer used and the prediction.

    Args:
        index: index of the first token that differs.
        turn: the turn whose prompt differs.
        message: the rollout's warning; empty if there is none.
        was: tokens of the parent segment from the index on; None if unknown.
        here: tokens of this segment from the index on.
    """

    index: int
    turn: int
    message: str
    was: tuple[int, ...] | None
    here: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TranscriptSegment:
    """A segment.

    Args:
        parting: where a call of the agent parted from the other conversations, so that the segment began; empty if none did.
        ids: all token ids of the segment.
        trained: number of tokens with mask 1.
        masked: number of generated tokens that the agent masked.
        stale: number of generated tokens that were masked because they are stale.
        runs: the selected runs.
        drifts: the selected drifts, by index.
    """

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
    parting: str = ""
    stale: int = 0


@dataclass(frozen=True, slots=True)
class Transcript:
    """A rollout and its selected segments."""

    rollout: rollout_service_pb2.Rollout
    segments: tuple[TranscriptSegment, ...]

    @property
    def outcome(self) -> outcome_pb2.Outcome:
        """Outcome of the rollout."""
        return self.rollout.outcome

    def select(self, segment: str | None, turn: int | None) -> Transcript:
        """Return the part for one segment, one turn, or both. Raises ValueError if it does not exist."""
        known = [each.id for each in self.segments]
        if segment is not None and segment not in known:
            raise ValueError(f"there is no segment {segment!r}; there are {', '.join(known) or 'none'}")
        left = [each for each in self.segments if segment in (None, each.id)]
        turns = sorted({run.turn for each in left for run in each.runs})
        if turn is not None and turn not in turns:
            raise ValueError(f"turn {turn} has no tokens; there are turns {_ranges(turns) or 'none'}")
        selected = [each if turn is None else _of_turn(each, turn) for each in left]
        return replace(self, segments=tuple(each for each in selected if each.runs))


def transcript_of(rollout: rollout_service_pb2.Rollout) -> Transcript:
    """Return the transcript of a rollout that was read with view "full".

    Raises ValueError if the rollout has not finished, was read with another view, or is inconsistent.
    """
    if not rollout.HasField("outcome"):
        raise ValueError("the rollout has not finished; read it again when it has an outcome")
    outcome = rollout.outcome
    samples(rollout)  # raises if segments and samples contradict each other
    if outcome.samples and not outcome.segments:
        raise ValueError('the rollout has samples but no segments; read it again with view "full"')
    found = [_segment(segment) for segment in outcome.segments]
    return Transcript(rollout, tuple(_with_drifts(each, found, outcome.warnings) for each in found))


def _segment(segment: token_pb2.Segment) -> TranscriptSegment:
    starts = accumulate((len(span.token_ids) for span in segment.spans), initial=0)
    runs = tuple(_run(span, start, segment.id) for span, start in zip(segment.spans, starts, strict=False))
    origin = segment.origin
    kind = SEGMENT_KINDS.get(origin.kind, _UNKNOWN)
    ids = tuple(token for run in runs for token in run.ids)
    trained, masked, stale = (sum(len(run.ids) for run in runs if run.letter == letter) for letter in "MAS")
    parting = parting_text(origin.parting) if origin.HasField("parting") else ""
    shares = origin.parent_id, origin.parent_tokens
    return TranscriptSegment(
        segment.id, kind, *shares, segment.verified, ids, trained, masked, runs, parting=parting, stale=stale
    )


def parting_text(parting: token_pb2.Parting) -> str:
    """Return where and why a call of an agent left its other conversations, on one line."""
    agent = f" of {parting.client_agent}" if parting.client_agent else ""
    call = f"a {parting.api} call{agent}" if parting.api else f"a call{agent}"
    if parting.field == "history":
        went_on = f" with {parting.expected!r}" if parting.expected else ""
        return f"{call} had only {parting.message} messages, where the conversation went on{went_on}"
    texts = f": {parting.expected!r}, now {parting.found!r}" if parting.expected or parting.found else ""
    return f"{call} parted at message {parting.message} ({parting.field}){texts}"


def _run(span: token_pb2.Span, start: int, segment_id: str) -> TokenRun:
    author = AUTHORS.get(span.author, _UNKNOWN)
    reason = MASK_REASONS.get(span.mask_reason, _UNKNOWN) if span.mask_reason else None
    logprobs = tuple(span.logprobs.values) if span.HasField("logprobs") else None
    if logprobs is not None and len(logprobs) != len(span.token_ids):
        raise ValueError(f"segment {segment_id!r}, token {start}: the numbers of logprobs and tokens differ")
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
        span.policy_step if span.HasField("policy_step") else None,
    )


def _letter(author: str, reason: str | None) -> str:
    if author == "model":
        return {None: "M", "author": "A", "stale": "S"}.get(reason, "?")
    return {"prompt": "P", "environment": "E", "closing": "C"}.get(reason or "", "?")


def _with_drifts(
    segment: TranscriptSegment, others: Sequence[TranscriptSegment], warnings: Sequence[outcome_pb2.Warning]
) -> TranscriptSegment:
    """Add drifts to a segment, from the warnings of its turns.

    The drift that opened the segment also shows the parent's tokens. It is added without a message if its warning is missing. A
    call that parted has no token index.
    """
    turns = {run.turn for run in segment.runs}
    opened = segment.runs[0].turn if segment.kind == "drift" and segment.runs and not segment.parting else None
    parent = next((each.ids for each in others if each.id == segment.parent_id), None)
    found = [
        _drift(segment, each, parent if each.turn == opened else None)
        for each in warnings
        if each.code == _DRIFT and each.turn in turns and each.HasField("index")
    ]
    if opened is not None and all(each.turn != opened for each in found):
        unreported = outcome_pb2.Warning(turn=opened, index=segment.parent_tokens)
        found.append(_drift(segment, unreported, parent))
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
    """Return sorted numbers as ranges: 1, 2, 3, 7 becomes "1-3, 7"."""
    found: list[list[int]] = []
    for turn in turns:
        if found and turn == found[-1][1] + 1:
            found[-1][1] = turn
        else:
            found.append([turn, turn])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)
