"""Compare a row with earlier ones: sampled tokens that train twice, equal rows, and the prompts of a trace.

A file may be larger than the memory, so a bounded window of earlier rows is compared.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rollout_server.verification.alignment import trained_spans
from rollout_server.verification.findings import FindingKind, SampleFinding
from rollout_server.verification.row_lists import SampleRow
from rollout_server.verification.shapes import SampleShape

_TOKENS: Final = 8 * 2**20
"""Tokens of earlier rows that are kept; 5 bytes each."""
_OVERHEAD: Final = 256
"""What a row costs besides its tokens, and a turn of it, counted in tokens."""
_ROWS: Final = 256
"""Most rows that are kept of one rollout."""
_DIGESTS: Final = 200_000
"""Digests of rows without a rollout id that are kept."""
_TURNS: Final = 64
"""Earlier turns of a trace that a prompt is compared with."""


@dataclass(frozen=True, slots=True)
class _EarlierRow:
    """A row of a rollout.

    Args:
        described: where the row is.
        ids: token ids of prompt and response.
        mask: one byte per id, 0 for the prompt.
        turns: index of the first trained token of each turn, counted from the first prompt token; None: not known.
    """

    described: str
    ids: array[int]
    mask: bytes
    turns: Mapping[int, int] | None

    @property
    def cost(self) -> int:
        """Memory that the row needs, counted in tokens."""
        return len(self.ids) + _OVERHEAD * (1 + len(self.turns or ()))


class TrainedTwice:
    """Find sampled tokens that two rows of a rollout train."""

    def __init__(self) -> None:
        self._rollouts: OrderedDict[str, deque[_EarlierRow]] = OrderedDict()
        self._tokens = 0

    def check(self, row: SampleRow) -> Iterator[SampleFinding]:
        """Yield a finding if an earlier row of the same rollout trains a token that this one trains, then keep the row."""
        uid = row.raw.uid
        if not uid or not row.trains:
            return
        ids = array("i", [*row.prompt, *row.response])
        current = _EarlierRow(row.described, ids, bytes(len(row.prompt)) + bytes(row.mask), _turns(row.raw.spans))
        for earlier in self._rollouts.get(uid, ()):
            index = _common_trained(earlier, current)
            if index is not None:
                at = row.mask_start + index - len(row.prompt)
                text = f"the token trains in {earlier.described} too: both rows are of rollout {uid!r}"
                yield row.finding(FindingKind.TRAINS_TWICE, row.raw.names.mask, at, text)
                break
        self._keep(uid, current)

    def _keep(self, uid: str, row: _EarlierRow) -> None:
        rows = self._rollouts.setdefault(uid, deque())
        self._rollouts.move_to_end(uid)
        rows.append(row)
        self._tokens += row.cost
        if len(rows) > _ROWS:
            self._tokens -= rows.popleft().cost
        while self._tokens > _TOKENS and len(self._rollouts) > 1:
            _, oldest = self._rollouts.popitem(last=False)
            self._tokens -= sum(each.cost for each in oldest)
        while self._tokens > _TOKENS and len(rows) > 1:
            self._tokens -= rows.popleft().cost


class EqualRows:
    """Find equal rows among those that name no rollout."""

    def __init__(self) -> None:
        self._seen: OrderedDict[bytes, str] = OrderedDict()

    def check(self, row: SampleRow) -> Iterator[SampleFinding]:
        """Yield a finding if an earlier row has the same tokens, mask and logprobs, then remember the row."""
        if row.raw.uid or not row.trains:
            return
        lists = (array("i", row.prompt), array("i", row.response), bytes(row.mask))
        digest = hashlib.blake2b(repr(row.logprobs).encode(), digest_size=16)
        for each in lists:
            digest.update(len(each).to_bytes(8, "big") + bytes(each))
        key = digest.digest()
        if key in self._seen:
            text = f"equal to {self._seen[key]}, and no rollout id tells them apart"
            yield row.finding(FindingKind.DUPLICATE_ROW, row.raw.names.response, None, text)
            return
        self._seen[key] = row.described
        if len(self._seen) > _DIGESTS:
            self._seen.popitem(last=False)


class TracePrompts:
    """Compare the prompt of each turn of an OpenEnv trace with the earlier turns."""

    def __init__(self) -> None:
        self._trace: tuple[str, int, str] | None = None
        self._turns: deque[list[int]] = deque(maxlen=_TURNS)

    def check(self, row: SampleRow) -> Iterator[SampleFinding]:
        """Yield a finding if the prompt extends no earlier turn: not the former one, and none before it (a fork)."""
        if row.raw.shape is not SampleShape.OPENENV:
            return
        location = row.raw.location
        trace = location.file, location.number, location.path.rpartition("turns[")[0]
        if trace != self._trace:
            self._trace = trace
            self._turns.clear()
        prompt = row.prompt
        if self._turns and not any(prompt[: len(ids)] == ids for ids in reversed(self._turns)):
            former = self._turns[-1]
            index = next((i for i, (a, b) in enumerate(zip(prompt, former, strict=False)) if a != b), len(prompt))
            text = f"the prompt differs here from the former turn's {len(former)} tokens, and extends no earlier turn"
            yield row.finding(FindingKind.PROMPT_DIVERGES, row.raw.names.prompt, index, text)
        self._turns.append([*prompt, *row.response])


def _turns(spans: list[Any] | None) -> Mapping[int, int] | None:
    """Return where the trained tokens of each turn begin; None if it is not known."""
    if spans is None:
        return None
    found: dict[int, int] = {}
    for span in spans:
        turn, start = (span.get("turn"), span.get("start")) if isinstance(span, dict) else (None, None)
        if not isinstance(turn, int) or not isinstance(start, int):
            return None
        if span.get("author") == "model" and span.get("reason") is None:
            found.setdefault(turn, start)
    return found


def _common_trained(earlier: _EarlierRow, row: _EarlierRow) -> int | None:
    """Return the index of the first token that both rows train, counted from the first prompt token; None if there is none.

    With known turns it is a token of a turn that both rows train. If one row extends the other, they may be parts of one segment,
    and each may train other tokens of the turn. Otherwise it is a token behind an equal prefix. A prefix that ends within a
    completion of both rows is no evidence: two completions of one prompt often begin with the same tokens.
    """
    turns = None if earlier.turns is None or row.turns is None else earlier.turns.keys() & row.turns.keys()
    if turns is not None and not turns:
        return None
    length = common_length(earlier.ids, row.ids)
    both = int.from_bytes(earlier.mask[:length]) & int.from_bytes(row.mask[:length])
    if turns and row.turns and (both or length < min(len(earlier.ids), len(row.ids))):
        return min(row.turns[turn] for turn in turns)
    if not both:
        return None
    index = length - (both.bit_length() + 7) // 8
    ends = [stop for each in (earlier, row) for start, stop in trained_spans(each.mask) if start <= index < stop]
    return index if min(ends) <= length else None


def common_length(one: array[int], other: array[int]) -> int:
    """Return the length of the common prefix of two arrays."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:  # equal up to `low`, different up to `high`
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
