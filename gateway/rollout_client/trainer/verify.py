"""Verification of a rollout: the server's samples must equal the trainer's ledgers, token by token."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from rollout_client.samples import TrainingSample
from rollout_client.trainer.ledger import SegmentLedger
from rollout_client.trainer.rollout_records import Record


@dataclass(frozen=True, slots=True)
class Mismatch:
    """First difference between the trainer's ledger and the server's sample.

    Args:
        segment_id: id of the segment.
        field: "segment", "length", "ids", "mask", "logprobs" or "policy_version".
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
    for sample in samples:
        # After a restarted prompt the two sides may use different ids for a segment: try the same id first, then the others.
        left.sort(key=lambda named: named[0] != sample.segment_id)
        wrong = [_segment_mismatch(left[0][1], sample)] if left else []
        same = 0 if wrong == [None] else _find_equal(left[1:], sample)
        if same is None:
            missing = Mismatch(sample.segment_id, "segment", None, "no such segment", "a sample of it")
            return wrong[0] if left and left[0][0] == sample.segment_id else missing
        _, ledger = left.pop(same)
        length = len(sample.prompt_ids) + len(sample.response_ids)
        found += _completed_turns(ledger, length)
        if length < ledger.checkpoints[-1].tokens:
            lacking.append(Mismatch(sample.segment_id, "length", None, f"{ledger.tokens} tokens", f"{length}"))
    # Tokens that no sample covers are a fault only if the samples have fewer completions than the server says it accepted.
    lacking += [
        Mismatch(segment_id, "segment", None, f"{ledger.tokens} tokens", "no sample of it")
        for segment_id, ledger in left
        if any(run.own for run in ledger.runs)
    ]
    return lacking[0] if lacking and found < turns else None


def _completed_turns(ledger: SegmentLedger, length: int) -> int:
    """Count the completions within the first `length` tokens of a segment, inherited tokens excluded."""
    start, turns = 0, set[int]()
    for run in ledger.runs:
        if run.by_model and ledger.inherited <= start < length:
            turns.add(run.turn)
        start += len(run.ids)
    return len(turns)


def _find_equal(left: Sequence[tuple[str, SegmentLedger]], sample: TrainingSample) -> int | None:
    """Return the index of the ledger that equals the sample, for ledgers after the first one; None if there is none."""
    equal = (at for at, (_, ledger) in enumerate(left, start=1) if _segment_mismatch(ledger, sample) is None)
    return next(equal, None)


def _segment_mismatch(ledger: SegmentLedger, sample: TrainingSample) -> Mismatch | None:
    actual = [*sample.prompt_ids, *sample.response_ids]
    expected = ledger.ids[: len(actual)].tolist()
    if (at := _first_difference(expected, actual)) is not None:
        return Mismatch(sample.segment_id, "ids", at, str(expected[at]), str(actual[at]))
    if len(actual) not in [checkpoint.tokens for checkpoint in ledger.checkpoints]:
        return Mismatch(sample.segment_id, "length", None, f"{ledger.tokens} tokens", f"{len(actual)}")
    return _mask_mismatch(ledger, sample) or _logprobs_mismatch(ledger, sample) or _policy_mismatch(ledger, sample)


def _mask_mismatch(ledger: SegmentLedger, sample: TrainingSample) -> Mismatch | None:
    """Compare masks: exactly the tokens generated here have mask 1, except those that the agent's author masked out."""
    actual = [*([0] * len(sample.prompt_ids)), *sample.response_mask]
    expected: list[int] = []
    for run in ledger.runs:
        start = len(expected)
        if run.by_model and not run.own and start >= ledger.inherited:
            expected += actual[start : start + len(run.ids)]  # known from the server's history only: cannot be verified
        else:
            expected += [int(run.own)] * len(run.ids)
    expected = expected[: len(actual)]
    for span in sample.spans or ():
        if span.reason == "author":
            expected[span.start : span.stop] = [0] * (span.stop - span.start)
    at = _first_difference(expected, actual)
    return None if at is None else Mismatch(sample.segment_id, "mask", at, str(expected[at]), str(actual[at]))


def _logprobs_mismatch(ledger: SegmentLedger, sample: TrainingSample) -> Mismatch | None:
    start, length, opening = 0, len(sample.prompt_ids) + len(sample.response_ids), len(sample.prompt_ids)
    known = True
    for run in ledger.runs:
        stop = start + len(run.ids)
        if run.own and start < length:
            known = known and run.logprobs is not None
            if sample.logprobs is not None and run.logprobs is not None:
                mask = sample.response_mask[start - opening : stop - opening]
                # Compare as float32, the precision on the wire.
                actual = array("f", sample.logprobs[start - opening : stop - opening]).tolist()
                expected = [value if trains else 0.0 for value, trains in zip(run.logprobs, mask, strict=True)]
                if (at := _first_difference(expected, actual)) is not None:
                    return Mismatch(sample.segment_id, "logprobs", start + at, repr(expected[at]), repr(actual[at]))
        start = stop
    if known == (sample.logprobs is not None) or not ledger.complete:
        return None
    text = {True: "one for each sampled token", False: "a completion without logprobs"}
    return Mismatch(sample.segment_id, "logprobs", None, text[known], text[not known])


def _policy_mismatch(ledger: SegmentLedger, sample: TrainingSample) -> Mismatch | None:
    if sample.spans is None:
        return None
    length = len(sample.prompt_ids) + len(sample.response_ids)
    actual = [""] * length
    for span in sample.spans:
        actual[span.start : span.stop] = [span.policy_version] * (span.stop - span.start)
    start = 0
    for run in ledger.runs:
        stop = min(start + len(run.ids), length)
        if run.own:
            expected = [run.policy_version] * (stop - start)
            if (at := _first_difference(expected, actual[start:stop])) is not None:
                return Mismatch(
                    sample.segment_id, "policy_version", start + at, repr(expected[at]), repr(actual[start + at])
                )
        start += len(run.ids)
    return None


def _first_difference(expected: Sequence[object], actual: Sequence[object]) -> int | None:
    """Return the first index at which two lists differ, up to the length of the shorter one; None if there is none."""
    if expected == actual:
        return None
    return next((at for at, (one, other) in enumerate(zip(expected, actual, strict=False)) if one != other), None)
