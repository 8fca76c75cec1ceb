"""Find masks that are one token late or early.

Such a mask raises no error in any trainer. Three things in a row show it:

* The generation prompt, such as `<|im_start|>assistant` and a line break, precedes each completion. The first prompt ends with it,
  so its tokens are known without a tokenizer.
* A stop token ends each completion. One that was cut by length has none, and the stop token that follows it has mask 0: by this
  alone, a mask is not found to be early.
* A token that the model did not sample usually has the logprob 0.0.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import compress, count, pairwise
from typing import Final

from rollout_server.verification.findings import FindingKind, SampleFinding
from rollout_server.verification.row_lists import SampleRow

_TAIL: Final = 4
"""Tokens at the end of the prompt that are compared with those before later completions."""
_DISTINCT: Final = 3
"""Different ids that these tokens must have. Otherwise a repeated token could look like a shift."""
_INVERTED: Final = bytes.maketrans(b"\x00\x01", b"\x01\x00")
_SHIFTS: Final = (0, 1, -1)
_WORDS: Final = {1: "late", -1: "early"}


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """What a tokenizer says about the ends of turns.

    Args:
        stops: ids of the tokens that end completions.
        generation_prompt: ids that precede a completion.
    """

    stops: Set[int] = frozenset()
    generation_prompt: Sequence[int] = ()


def trained_spans(mask: Sequence[int]) -> list[tuple[int, int]]:
    """Return start and stop of each run of mask 1."""
    return [run.span() for run in re.finditer(b"\x01+", bytes(mask))]


def generation_prompt(row: SampleRow) -> list[int]:
    """Return the last tokens of the prompt, which precede every completion; empty if they do not identify it."""
    tail = row.prompt[-_TAIL:]
    return tail if len(set(tail)) >= _DISTINCT and not row.raw.part else []


def find_run(ids: list[int], run: Sequence[int]) -> int:
    """Return the index of the first occurrence of a run of ids; -1 if there is none."""
    start = 0
    while run:
        try:
            start = ids.index(run[0], start)
        except ValueError:
            return -1
        if ids[start : start + len(run)] == run:
            return start
        start += 1
    return -1


def check_alignment(row: SampleRow, tokens: TurnTokens) -> Iterator[SampleFinding]:
    """Yield a finding if the mask of a row is shifted, or may be."""
    name = row.raw.names.mask
    found = _shift_at_boundaries(row, tokens) if _trains_whole_completions(row) else None
    found = found or _shift_of_logprobs(row)
    if found is not None:
        shift, index, reason = found
        text = f"the mask is one token {_WORDS[shift]}: {reason}"
        yield row.finding(FindingKind.MASK_SHIFTED, name, row.mask_start + index, text)
    elif row.mask[:2] == [0, 1] and row.raw.spans is None:
        text = "the first token of the response has mask 0 and the second one 1; a mask that is one token late looks like this"
        yield row.finding(FindingKind.MASK_EDGE, name, row.mask_start, text)
    elif row.mask[-2:] == [1, 0] and row.response[-1] in tokens.stops:
        text = "the stop token at the end has mask 0, so that the model does not learn to stop"
        yield row.finding(FindingKind.MASK_EDGE, name, row.mask_start + len(row.mask) - 1, text)


def _trains_whole_completions(row: SampleRow) -> bool:
    """Return whether each run of mask 1 is a whole completion. Stale tokens are masked out or split off within a completion too."""
    return not row.raw.part and all(
        not isinstance(span, dict) or span.get("author") != "model" or span.get("reason") is None
        for span in row.raw.spans or ()
    )


def _shift_at_boundaries(row: SampleRow, tokens: TurnTokens) -> tuple[int, int, str] | None:
    """Return the shift of most boundaries between two completions, the first index that shows it, and the reason."""
    spans = trained_spans(row.mask)
    tails = [tail for tail in (generation_prompt(row), list(tokens.generation_prompt)) if tail]
    shifts = [
        _boundary_shift(row.response, (stop, start), tails, tokens.stops) for (_, stop), (start, _) in pairwise(spans)
    ]
    for shift, votes in Counter(shifts).most_common(1):
        if shift and votes * 2 > len(shifts):
            start = spans[shifts.index(shift) + 1][0]
            index = start - 1 if shift > 0 else start
            where = f"at {votes} of {len(shifts)} boundaries between completions"
            return shift, index, f"{where} the generation prompt or the stop token is one token away"
    return None


def _boundary_shift(ids: list[int], gap: tuple[int, int], tails: Sequence[list[int]], stops: Set[int]) -> int:
    """Return by how many tokens the mask is late (1) or early (-1) at a boundary; 0: it is right, or not known.

    Args:
        ids: token ids of the response.
        gap: start and stop of the tokens with mask 0 between two trained spans.
        tails: the tokens that may precede a completion.
        stops: ids that end completions.
    """
    stop, start = gap
    by_start = _first_shift(
        any(ids[max(0, start - shift - len(tail)) : start - shift] == tail for tail in tails) for shift in _SHIFTS
    )
    by_stop = _first_shift(0 <= stop - shift - 1 < len(ids) and ids[stop - shift - 1] in stops for shift in _SHIFTS)
    if by_start is None:
        return 1 if by_stop == 1 else 0
    return by_start if by_stop in (None, by_start) else 0


def _first_shift(matches: Iterator[bool]) -> int | None:
    """Return the first of `_SHIFTS` that matches; None if none does."""
    return next((shift for shift, match in zip(_SHIFTS, matches, strict=True) if match), None)


def _shift_of_logprobs(row: SampleRow) -> tuple[int, int, str] | None:
    """Return the shift if the logprobs lie one token beside the mask.

    All tokens with a logprob other than 0.0 then have mask 1 in the mask moved back, and a token leaves the mask that has none.
    """
    if row.logprobs is None:
        return None
    masked = bytes(row.mask).translate(_INVERTED)
    outside = next((i for i in compress(count(), masked) if row.logprobs[i]), None)
    if outside is None:
        return None
    for shift in (1, -1):
        moved = [*row.mask[1:], 1] if shift > 0 else [1, *row.mask[:-1]]
        triples = list(zip(row.logprobs, row.mask, moved, strict=True))
        covered = all(after for value, _, after in triples if value)
        if covered and any(before and not after and not value for value, before, after in triples):
            return (
                shift,
                outside,
                f"{row.raw.names.logprobs} has logprobs beside the mask, and none where it was extended",
            )
    return None
