"""Checks of one row by itself, without a tokenizer: logprobs, what trains, the reward, and the fields of our own samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import compress, count
from typing import Any

from rollout_client.export import from_dict

from rollout_server.verification.alignment import find_run, generation_prompt
from rollout_server.verification.findings import FindingKind, SampleFinding, shown_value
from rollout_server.verification.row_lists import SampleRow, more_values
from rollout_server.verification.shapes import MISSING, RawRow, SampleShape

_LEAST_ZEROS = 2
"""Trained tokens that a row needs before logprobs of exactly 0.0 are suspicious. A single token may well be certain."""


def check_row(row: SampleRow) -> Iterator[SampleFinding]:
    """Yield the findings about the logprobs and the mask of a row."""
    yield from _check_logprobs(row)
    yield from _check_mask(row)
    if row.raw.trainable and row.raw.spans is not None:
        yield from _check_spans(row, row.raw.spans)


def check_reward(raw: RawRow) -> Iterator[SampleFinding]:
    """Yield a finding if a reward, or one of a list of rewards, is no finite number. Null is allowed."""
    values = raw.reward if isinstance(raw.reward, list) else [raw.reward]
    wrong = [i for i, value in enumerate(values) if value not in (MISSING, None) and not _is_finite(value)]
    if wrong:
        text = f"{shown_value(values[wrong[0]])} is no finite number"
        index = wrong[0] if isinstance(raw.reward, list) else None
        yield SampleFinding(FindingKind.REWARD, raw.location, text, raw.names.reward, index)


def reward_of(raw: RawRow) -> float | None:
    """Return the reward of a row as a number; None if it has none, or not one."""
    value = raw.reward
    return float(value) if isinstance(value, int | float) and _is_finite(value) else None


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an int beyond the range of float
        return False


def _check_logprobs(row: SampleRow) -> Iterator[SampleFinding]:
    """Yield findings about logprobs. Those of tokens with mask 0 count too: a trainer multiplies NaN by 0, which is NaN."""
    if row.logprobs is None:
        return
    name, start = row.raw.names.logprobs, row.logprobs_start
    wrong = _wrong_logprobs(row.logprobs)
    if wrong:
        value = row.logprobs[wrong[0]]
        text = f"{value} is no logprob: it must be finite and not above 0" + more_values(wrong)
        yield row.finding(FindingKind.LOGPROBS, name, start + wrong[0], text)
    missing = [i for i in compress(count(), row.mask) if row.logprobs[i] is None] if None in row.logprobs else []
    if missing:
        text = "null for a token with mask 1" + more_values(missing)
        yield row.finding(FindingKind.MISSING_LOGPROBS, name, start + missing[0], text)
    trained = sum(row.mask)
    if row.trains and trained >= _LEAST_ZEROS and all(value == 0 for value in compress(row.logprobs, row.mask)):
        text = f"all {trained} trained tokens have logprob 0.0; the sampler may have sent none"
        yield row.finding(FindingKind.ZERO_LOGPROBS, name, start + row.mask.index(1), text)


def _wrong_logprobs(logprobs: Sequence[float | None]) -> list[int]:
    """Return the indexes of the values that are positive, NaN or infinite. Single values are looked at only if there is one."""
    numbers = [value for value in logprobs if value is not None] if None in logprobs else logprobs
    if math.isfinite(sum(numbers)) and max(numbers, default=0) <= 0:  # type: ignore[arg-type, type-var, operator]
        return []
    return [i for i, value in enumerate(logprobs) if value is not None and not -math.inf < value <= 0]


def _check_mask(row: SampleRow) -> Iterator[SampleFinding]:
    if not row.raw.trainable:
        return
    name = row.raw.names.mask
    if not row.trains:
        text = "no token of the row trains, and the row gives no reason"
        yield row.finding(FindingKind.ROW_WITHOUT_TRAINING, name, None, text)
    elif all(row.mask):
        index = find_run(row.response, generation_prompt(row))
        if index >= 0 or row.raw.turns > 1:
            index, where = (
                max(0, index),
                f", such as the generation prompt in {row.raw.names.response}" if index >= 0 else "",
            )
            text = f"all {len(row.mask)} tokens train, also those between the completions{where}"
            yield row.finding(FindingKind.ALL_ONES, name, row.mask_start + index, text)


def _check_spans(row: SampleRow, spans: Sequence[Any]) -> Iterator[SampleFinding]:
    """Yield a finding at the first token whose mask differs from the one that the spans of the row imply."""
    cut, total = len(row.prompt), len(row.prompt) + len(row.response)
    implied = bytearray(total)
    for span in spans:
        if isinstance(span, dict) and span.get("author") == "model" and span.get("reason") is None:
            start, stop = span.get("start"), span.get("stop")
            if isinstance(start, int) and isinstance(stop, int) and 0 <= start < stop <= total:
                implied[start:stop] = bytes([1]) * (stop - start)
    index = next((i for i, pair in enumerate(zip(row.mask, implied[cut:], strict=True)) if pair[0] != pair[1]), None)
    if index is not None:
        text = f"{row.mask[index]}, but the spans of the row imply {implied[cut + index]}"
        yield row.finding(FindingKind.INCONSISTENT, row.raw.names.mask, index, text)


def check_fields(raw: RawRow) -> Iterator[SampleFinding]:
    """Yield a finding if a sample of this project contradicts itself, for example if its mask differs from its spans."""
    sample = raw.sample
    if raw.shape is not SampleShape.ROLLOUT or sample is None:
        return
    scores = sample.get("scores")
    try:
        if isinstance(scores, list):  # a Parquet file has a list of names and values
            sample = {**sample, "scores": {each["name"]: each["value"] for each in scores}}
        from_dict(sample)
    except (ValueError, TypeError, KeyError) as error:
        yield SampleFinding(FindingKind.INCONSISTENT, raw.location, " ".join(str(error).split())[:300])
