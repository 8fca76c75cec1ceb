"""Whether what the server makes of a rollout is what the trainer generated, token by token."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from rollout_client.samples import TrainingSample
from rollout_client.trainer.ledger import SegmentLedger
from rollout_client.trainer.rollout_records import Record


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where the two records part.

    Args:
        segment_id: the segment.
        field: "segment", "length", "ids", "mask", "logprobs" or "policy_version".
        index: the token, counted from the start of the prompt; None: no single one.
        ours: what the trainer kept.
        theirs: what the server sent.
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
    """The first difference; None: element by element the same.

    Args:
        record: the trainer's.
        samples: the server's.
        turns: answers that the server took, by its own count. The last one of a conversation may be none of them: the server
            had stopped waiting for it. Whatever it took must be there.
    """
    left = list(record.ledgers())
    found, lacking = 0, list[Mismatch]()
    for sample in samples:
        # Where a prompt began anew, the two sides may call a segment by different names.
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
    lacking += [
        Mismatch(segment_id, "segment", None, f"{ledger.tokens} tokens", "no sample of it")
        for segment_id, ledger in left
        if any(run.own for run in ledger.runs)
    ]
    return lacking[0] if lacking and found < turns else None


def _completed_turns(ledger: SegmentLedger, length: int) -> int:
    """How many turns the model answered in the first tokens of a segment, those left out that belong to another one."""
    start, answered = 0, set[int]()
    for run in ledger.runs:
        if run.by_model and ledger.inherited <= start < length:
            answered.add(run.turn)
        start += len(run.ids)
    return len(answered)


def _find_equal(left: Sequence[tuple[str, SegmentLedger]], sample: TrainingSample) -> int | None:
    """Which one of those behind the first is the sample's."""
    equal = (at for at, (_, ledger) in enumerate(left, start=1) if _segment_mismatch(ledger, sample) is None)
    return next(equal, None)


def _segment_mismatch(ledger: SegmentLedger, sample: TrainingSample) -> Mismatch | None:
    theirs = [*sample.prompt_ids, *sample.response_ids]
    ours = ledger.ids[: len(theirs)].tolist()
    if (at := _first_difference(ours, theirs)) is not None:
        return Mismatch(sample.segment_id, "ids", at, str(ours[at]), str(theirs[at]))
    if len(theirs) not in [checkpoint.tokens for checkpoint in ledger.checkpoints]:
        return Mismatch(sample.segment_id, "length", None, f"{ledger.tokens} tokens", f"{len(theirs)}")
    return _mask_mismatch(ledger, sample) or _logprobs_mismatch(ledger, sample) or _policy_mismatch(ledger, sample)


def _mask_mismatch(ledger: SegmentLedger, sample: TrainingSample) -> Mismatch | None:
    """What trains was written by the model here; what the model wrote and does not train, an agent's author masked."""
    theirs = [*([0] * len(sample.prompt_ids)), *sample.response_mask]
    ours: list[int] = []
    for run in ledger.runs:
        start = len(ours)
        if run.by_model and not run.own and start >= ledger.inherited:
            ours += theirs[start : start + len(run.ids)]  # the server's word
        else:
            ours += [int(run.own)] * len(run.ids)
    ours = ours[: len(theirs)]
    for span in sample.spans or ():
        if span.reason == "author":
            ours[span.start : span.stop] = [0] * (span.stop - span.start)
    at = _first_difference(ours, theirs)
    return None if at is None else Mismatch(sample.segment_id, "mask", at, str(ours[at]), str(theirs[at]))


def _logprobs_mismatch(ledger: SegmentLedger, sample: TrainingSample) -> Mismatch | None:
    start, length, opening = 0, len(sample.prompt_ids) + len(sample.response_ids), len(sample.prompt_ids)
    known = True
    for run in ledger.runs:
        stop = start + len(run.ids)
        if run.own and start < length:
            known = known and run.logprobs is not None
            if sample.logprobs is not None and run.logprobs is not None:
                mask = sample.response_mask[start - opening : stop - opening]
                # As precise as they travel.
                theirs = array("f", sample.logprobs[start - opening : stop - opening]).tolist()
                ours = [value if trains else 0.0 for value, trains in zip(run.logprobs, mask, strict=True)]
                if (at := _first_difference(ours, theirs)) is not None:
                    return Mismatch(sample.segment_id, "logprobs", start + at, repr(ours[at]), repr(theirs[at]))
        start = stop
    if known == (sample.logprobs is not None) or not ledger.complete:
        return None
    words = {True: "one for each sampled token", False: "an answer without them"}
    return Mismatch(sample.segment_id, "logprobs", None, words[known], words[not known])


def _policy_mismatch(ledger: SegmentLedger, sample: TrainingSample) -> Mismatch | None:
    if sample.spans is None:
        return None
    length = len(sample.prompt_ids) + len(sample.response_ids)
    theirs = [""] * length
    for span in sample.spans:
        theirs[span.start : span.stop] = [span.policy_version] * (span.stop - span.start)
    start = 0
    for run in ledger.runs:
        stop = min(start + len(run.ids), length)
        if run.own:
            ours = [run.policy_version] * (stop - start)
            if (at := _first_difference(ours, theirs[start:stop])) is not None:
                return Mismatch(
                    sample.segment_id, "policy_version", start + at, repr(ours[at]), repr(theirs[start + at])
                )
        start += len(run.ids)
    return None


def _first_difference(ours: Sequence[object], theirs: Sequence[object]) -> int | None:
    """The first index at which two lists differ, as far as both go."""
    if ours == theirs:
        return None
    return next((at for at, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other), None)
