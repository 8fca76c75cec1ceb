"""The lists of a row: types, ranges and lengths. A row that passes has lists that belong together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, Final

from rollout_server.verification.findings import FindingKind, SampleFinding, shown_value
from rollout_server.verification.shapes import MISSING, RawRow, SampleShape

LARGEST_ID: Final = 2**31 - 1
"""Trainers store token ids as int32 or int64, and files of this project as int32."""
_NUMBERS: Final = frozenset({int, float, bool})
_MASK_COVERS_PROMPT: Final = frozenset({SampleShape.OPENENV, SampleShape.GENERIC})
_LOGPROBS_COVER_PROMPT: Final = frozenset({SampleShape.GENERIC})


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A row whose lists are valid. Below, T is the number of response tokens.

    Args:
        raw: names, location and ids of the row.
        prompt: token ids of the prompt.
        response: T token ids.
        mask: T values, 0 or 1; all 1 if the row has no mask.
        logprobs: T numbers, None where the file has null; None: the row has no logprobs.
        mask_start: index in the file's mask of the first response token, which is not 0 if the mask covers the prompt too.
        logprobs_start: the same for the logprobs.
    """

    raw: RawRow
    prompt: list[int]
    response: list[int]
    mask: list[int]
    logprobs: list[float | None] | None
    mask_start: int = 0
    logprobs_start: int = 0

    @property
    def trains(self) -> bool:
        """Whether a token of the row trains."""
        return self.raw.trainable and 1 in self.mask

    @property
    def described(self) -> str:
        """Where the row is, for the text of another row's finding."""
        location, name = self.raw.location, self.raw.names.response
        within = f", {location.path}{name}" if location.path or name.endswith("]") else ""
        return f"{location.file}, line {location.number}{within}"

    def finding(self, kind: FindingKind, name: str, index: int | None, text: str) -> SampleFinding:
        """Return a finding about an item of one of the row's lists."""
        return SampleFinding(kind, self.raw.location, text, name, index)


def read_lists(raw: RawRow, vocabulary: int) -> tuple[SampleRow | None, list[SampleFinding]]:
    """Return the row with valid lists, and the findings. The row is None if a finding makes further checks meaningless.

    Args:
        raw: the row.
        vocabulary: number of token ids of the tokenizer; 0: unknown.
    """
    found = [*_id_findings(raw, vocabulary)]
    if found:
        return None, found
    prompt, response = _list(raw.prompt), _list(raw.response)
    in_mask, in_logprobs = raw.shape in _MASK_COVERS_PROMPT, raw.shape in _LOGPROBS_COVER_PROMPT
    mask, at_mask = _response_part(raw.mask, len(prompt) if in_mask else 0, len(response))
    logprobs, at_logprobs = _response_part(raw.logprobs, len(prompt) if in_logprobs else 0, len(response))
    found += _mask_findings(raw, mask, at_mask, len(response))
    found += _logprob_findings(raw, logprobs, at_logprobs, len(response))
    if found:
        return None, found
    if mask is None:
        text = f"no mask was found, so that all {len(response)} tokens of the response train"
        found.append(SampleFinding(FindingKind.NO_MASK, raw.location, text))
    ones = [1] * len(response) if mask is None else list(map(int, mask))
    return SampleRow(raw, prompt, response, ones, logprobs, at_mask, at_logprobs), found


def _list(value: object) -> list[int]:
    return value if isinstance(value, list) else []


def wrong_ids(ids: Sequence[object], vocabulary: int) -> list[int]:
    """Return the indexes of the values that are no token ids: no integer, negative, above 2^31-1 or beyond the vocabulary."""
    largest = min(vocabulary - 1, LARGEST_ID) if vocabulary else LARGEST_ID
    if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= largest):  # type: ignore[type-var, operator]
        return []
    return [i for i, each in enumerate(ids) if type(each) is not int or not 0 <= each <= largest]


def _id_findings(raw: RawRow, vocabulary: int) -> Iterator[SampleFinding]:
    for name, value in ((raw.names.prompt, raw.prompt), (raw.names.response, raw.response)):
        if not isinstance(value, list):
            yield _missing(raw, name, value, "a list of token ids")
        elif wrong := wrong_ids(value, vocabulary):
            limit = f"the tokenizer's {vocabulary} ids" if vocabulary else f"integers from 0 to {LARGEST_ID}"
            text = f"{shown_value(value[wrong[0]])} is no token id, which are {limit}{more_values(wrong)}"
            yield SampleFinding(FindingKind.TOKEN_IDS, raw.location, text, name, wrong[0])


def _response_part(value: object, prompt: int, response: int) -> tuple[list[Any] | None, int]:
    """Return the values of the response, and the index of the first of them in the file's list.

    Args:
        value: the list in the file.
        prompt: number of prompt tokens that the list may cover too, which its length shows.
        response: number of response tokens.
    """
    if not isinstance(value, list):
        return None, 0
    return (value[prompt:], prompt) if len(value) == prompt + response else (value, 0)


def _mask_findings(raw: RawRow, mask: list[Any] | None, start: int, response: int) -> Iterator[SampleFinding]:
    name, whole = raw.names.mask, raw.mask
    if mask is None or not isinstance(whole, list):
        if raw.mask not in (MISSING, None) or raw.shape in (SampleShape.ROLLOUT, SampleShape.OPENENV):
            yield _missing(raw, name, raw.mask, "a list of 0 and 1")
        return
    if raw.shape is SampleShape.OPENENV and not start and isinstance(raw.prompt, list) and raw.prompt:
        text = f"{len(whole)} values for {len(raw.prompt)} + {response} tokens: an OpenEnv mask covers prompt and completion"
        yield SampleFinding(FindingKind.LENGTHS, raw.location, text, name)
    elif len(mask) != response:
        text = f"{len(mask)} values for {response} ids in {raw.names.response}"
        yield SampleFinding(FindingKind.LENGTHS, raw.location, text, name)
    elif wrong := _wrong_mask(whole):
        text = f"{shown_value(whole[wrong[0]])} is neither 0 nor 1{more_values(wrong)}"
        yield SampleFinding(FindingKind.MASK_VALUES, raw.location, text, name, wrong[0])
    elif trained := [i for i, each in enumerate(whole[:start]) if each]:
        text = f"a token of the prompt has mask 1; only sampled tokens train{more_values(trained)}"
        yield SampleFinding(FindingKind.PROMPT_TRAINS, raw.location, text, name, trained[0])


def _logprob_findings(raw: RawRow, logprobs: list[Any] | None, start: int, response: int) -> Iterator[SampleFinding]:
    name = raw.names.logprobs
    if logprobs is None:
        if raw.logprobs not in (MISSING, None) or raw.shape is SampleShape.OPENENV:
            yield _missing(raw, name, raw.logprobs, "a list of numbers")
    elif len(logprobs) != response:
        text = f"{len(logprobs)} logprobs for {response} ids in {raw.names.response}"
        yield SampleFinding(FindingKind.LENGTHS, raw.location, text, name)
    elif wrong := _wrong_numbers(logprobs):
        text = f"{shown_value(logprobs[wrong[0]])} is no number{more_values(wrong)}"
        yield SampleFinding(FindingKind.LOGPROBS, raw.location, text, name, wrong[0] + start)


# Like `wrong_ids`, these look at single values only if one of them is wrong: files are large.
def _wrong_mask(mask: Sequence[Any]) -> list[int]:
    """Return the indexes of the values that are neither 0 nor 1. The numbers 0.0 and 1.0 and booleans are allowed."""
    if set(map(type, mask)) <= _NUMBERS and set(mask) <= {0, 1}:
        return []
    return [i for i, each in enumerate(mask) if type(each) not in _NUMBERS or each not in (0, 1)]


def _wrong_numbers(logprobs: Sequence[Any]) -> list[int]:
    """Return the indexes of the values that are no numbers which a float can hold, and not null."""
    if set(map(type, logprobs)) <= {float, NoneType}:
        return []
    return [
        i
        for i, each in enumerate(logprobs)
        if not (each is None or type(each) is float or (type(each) is int and abs(each) <= LARGEST_ID))
    ]


def _missing(raw: RawRow, name: str, value: object, needed: str) -> SampleFinding:
    text = f"missing; {needed} is needed" if value is MISSING else f"{shown_value(value)} is not {needed}"
    return SampleFinding(FindingKind.MISSING_FIELD, raw.location, text, name)


def more_values(wrong: Sequence[int]) -> str:
    """Return how many wrong values there are, as the end of a message about the first of them."""
    return f" ({len(wrong)} such values)" if len(wrong) > 1 else ""
