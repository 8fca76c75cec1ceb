"""Verification of a rollout: the server's samples must equal the trainer's ledgers, token by token."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from rollout_client.samples import TrainingSample
from rollout_client.trainer.ledger import SegmentLedger
from rollout_client.trainer.rollout_records import Record

_Policy: TypeAlias = tuple[str, int | None]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """First difference between the trainer's ledger and the server's sample.

    Args:
        segment_id: id of the segment.
        field: "segment", "length", "ids", "mask", "logprobs", "policy_version", "policy_step", or "part": a token is in none of the
            samples into which its segment was split, or in two.
        index: index of the token, counted from the first prompt token. None: the difference has no single token.
        ours: value in the trainer's ledger.
        theirs: value in the server's sample.
    """

    segment_id: str
    field: str
    index: int | None
    ours: str
    theirs: str

    def __str__(self) -> str:
        where = f" at token {self.index}" if self.index is not None else ""
        return (
            f"segment {self.segment_id!r}, {self.field}{where}: the trainer has {self.ours}, the server {self.theirs}"
        )


def find_mismatch(record: Record, samples: Sequence[TrainingSample], *, turns: int) -> Mismatch | None:
    """Return the first difference, or None if all samples equal the ledgers element by element.

    Args:
        record: the trainer's record.
        samples: the server's samples.
        turns: number of completions that the server accepted, by its own count. The server may have stopped waiting for the last
            completion of a conversation, so the ledger may have more. Every accepted completion must be in a sample.
    """
    left = list(record.ledgers())
    found, lacking = 0, list[Mismatch]()
    for segment_id, parts in _parts_by_segment(samples).items():
        # After a restarted prompt the two sides may use different ids for a segment: try the same id first, then the others.
        left = [each for each in left if each[0] == segment_id] + [each for each in left if each[0] != segment_id]
        wrong = [_segment_mismatch(left[0][1], parts)] if left else []
        same = 0 if wrong == [None] else _find_equal(left[1:], parts)
        if same is None:
            missing = Mismatch(segment_id, "segment", None, "no such segment", "a sample of it")
            return wrong[0] if left and left[0][0] == segment_id else missing
        _, ledger = left.pop(same)
        length = _window(parts[-1])[1]
        found += _completed_turns(ledger, length)
        if length < ledger.checkpoints[-1].tokens:
            lacking.append(Mismatch(segment_id, "length", None, f"{ledger.tokens} tokens", f"{length}"))
    # Tokens that no sample covers are a fault only if the samples have fewer completions than the server says it accepted.
    lacking += [
        Mismatch(segment_id, "segment", None, f"{ledger.tokens} tokens", "no sample of it")
        for segment_id, ledger in left
        if any(run.own for run in ledger.runs)
    ]
    return lacking[0] if lacking and found < turns else None


def _parts_by_segment(samples: Sequence[TrainingSample]) -> Mapping[str, Sequence[TrainingSample]]:
    """Return the samples of each segment, in order; nearly always one."""
    found: dict[str, list[TrainingSample]] = {}
    for sample in samples:
        found.setdefault(sample.segment_id, []).append(sample)
    return found


def _window(sample: TrainingSample) -> tuple[int, int]:
    """Return start and stop of the response in its segment."""
    return len(sample.prompt_ids), len(sample.prompt_ids) + len(sample.response_ids)


def _completed_turns(ledger: SegmentLedger, length: int) -> int:
    """Count the completions within the first `length` tokens of a segment, inherited tokens excluded."""
    start, turns = 0, set[int]()
    for run in ledger.runs:
        if run.by_model and ledger.inherited <= start < length:
            turns.add(run.turn)
        start += len(run.ids)
    return len(turns)


def _find_equal(left: Sequence[tuple[str, SegmentLedger]], parts: Sequence[TrainingSample]) -> int | None:
    """Return the index of the ledger that equals the samples, for ledgers after the first one; None if there is none."""
    equal = (at for at, (_, ledger) in enumerate(left, start=1) if _segment_mismatch(ledger, parts) is None)
    return next(equal, None)


def _segment_mismatch(ledger: SegmentLedger, parts: Sequence[TrainingSample]) -> Mismatch | None:
    for sample in parts:
        actual = [*sample.prompt_ids, *sample.response_ids]
        expected = ledger.ids[: len(actual)].tolist()
        if (at := _first_difference(expected, actual)) is not None:
            return Mismatch(sample.segment_id, "ids", at, str(expected[at]), str(actual[at]))
        ends = [checkpoint.tokens for checkpoint in ledger.checkpoints]
        if len(actual) > ledger.tokens or (sample is parts[-1] and len(actual) not in ends):
            return Mismatch(sample.segment_id, "length", None, f"{ledger.tokens} tokens", f"{len(actual)}")
        wrong = _mask_mismatch(ledger, sample) or _logprobs_mismatch(ledger, sample) or _policy_mismatch(ledger, sample)
        if wrong is not None:
            return wrong
    return _part_mismatch(ledger, parts) if parts[-1].part else None


def _part_mismatch(ledger: SegmentLedger, parts: Sequence[TrainingSample]) -> Mismatch | None:
    """Compare the samples of a split segment: each generated token must be in the response of exactly one."""
    windows, start, segment_id = [_window(each) for each in parts], 0, parts[0].segment_id
    for (_, before), (after, _) in pairwise(windows):
        if after < before:
            return Mismatch(segment_id, "part", after, "each token in one sample", "the token in two")
    for run in ledger.runs:
        stop = min(start + len(run.ids), windows[-1][1])
        covered = sum(max(0, min(stop, last) - max(start, first)) for first, last in windows)
        if run.own and covered < stop - start:
            return Mismatch(segment_id, "part", start, "each token in a sample", f"{covered} of {stop - start} tokens")
        start += len(run.ids)
    return None


def _mask_mismatch(ledger: SegmentLedger, sample: TrainingSample) -> Mismatch | None:
    """Compare masks: exactly the tokens generated here have mask 1, except masked out ones and those of an earlier part."""
    actual = [*([0] * len(sample.prompt_ids)), *sample.response_mask]
    expected: list[int] = []
    for run in ledger.runs:
        start = len(expected)
        if run.by_model and not run.own and start >= ledger.inherited:
            expected += actual[start : start + len(run.ids)]  # known from the server's history only: cannot be verified
        else:
            expected += [int(run.own)] * len(run.ids)
    expected = expected[: len(actual)]
    if sample.part:
        expected[: len(sample.prompt_ids)] = [0] * len(sample.prompt_ids)
    for span in sample.spans or ():
        if span.reason in ("author", "stale"):
            expected[span.start : span.stop] = [0] * (span.stop - span.start)
    at = _first_difference(expected, actual)
    return None if at is None else Mismatch(sample.segment_id, "mask", at, str(expected[at]), str(actual[at]))


def _logprobs_mismatch(ledger: SegmentLedger, sample: TrainingSample) -> Mismatch | None:
    start, known, (opening, length) = 0, True, _window(sample)
    # The logprobs of an aborted completion are known if each of its parts has them.
    lacking = {run.turn for run in ledger.runs if run.own and run.logprobs is None}
    for run in ledger.runs:
        first, last = max(start, opening), min(start + len(run.ids), length)
        if run.own and first < last:
            known = known and run.turn not in lacking
            if sample.logprobs is not None and run.logprobs is not None:
                mask, values = sample.response_mask[first - opening : last - opening], run.logprobs[first - start :]
                # Compare as float32, the precision on the wire.
                actual = array("f", sample.logprobs[first - opening : last - opening]).tolist()
                expected = [value if trains else 0.0 for value, trains in zip(values, mask, strict=False)]
                if (at := _first_difference(expected, actual)) is not None:
                    return Mismatch(sample.segment_id, "logprobs", first + at, repr(expected[at]), repr(actual[at]))
        start += len(run.ids)
    if known == (sample.logprobs is not None) or not ledger.complete:
        return None
    text = {True: "one for each sampled token", False: "a completion without logprobs"}
    return Mismatch(sample.segment_id, "logprobs", None, text[known], text[not known])


def _policy_mismatch(ledger: SegmentLedger, sample: TrainingSample) -> Mismatch | None:
    """Compare versions and steps of the response. Servers without policy steps send none."""
    if sample.spans is None:
        return None
    steps = any(span.policy_step is not None for span in sample.spans)
    start, (opening, length) = 0, _window(sample)
    actual: list[_Policy] = [("", None)] * length
    for span in sample.spans:
        actual[span.start : span.stop] = [(span.policy_version, span.policy_step)] * (span.stop - span.start)
    for run in ledger.runs:
        first, last = max(start, opening), min(start + len(run.ids), length)
        start += len(run.ids)
        for at in range(first, last) if run.own else ():
            version, step = actual[at]
            if version != run.policy_version:
                return Mismatch(sample.segment_id, "policy_version", at, repr(run.policy_version), repr(version))
            if steps and step != run.policy_step:
                return Mismatch(sample.segment_id, "policy_step", at, str(run.policy_step), str(step))
    return None


def _first_difference(expected: Sequence[object], actual: Sequence[object]) -> int | None:
    """Return the first index at which two lists differ, up to the length of the shorter one; None if there is none."""
    if expected == actual:
        return None
    return next((at for at, (one, other) in enumerate(zip(expected, actual, strict=False)) if one != other), None)
