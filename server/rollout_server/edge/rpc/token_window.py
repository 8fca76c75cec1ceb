"""The tokens whose texts DecodeTokens returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from osmosis.rollout.v1 import rollout_service_pb2 as pb

from rollout_server.core.error import InvalidRequest, NotFound, OutOfRange, Violation
from rollout_server.core.ledger import Tokens, pack_tokens
from rollout_server.edge.tokens.token_text import CONTEXT_TOKENS, window_token_texts
from rollout_server.edge.tokens.tokenizer import LoadedTokenizer
from rollout_server.edge.wire.message import utf8
from rollout_server.runtime.rollout import Rollout

MOST_TOKENS: Final = 4096


@dataclass(frozen=True, slots=True)
class TokenWindow:
    """Tokens of a segment from `start` to before `stop`, and some around them.

    Args:
        ids: the ids from the token `first` of the segment on.
        cuts: where spans begin, as indices in the segment.
    """

    ids: Tokens
    first: int
    start: int
    stop: int
    cuts: tuple[int, ...]

    def texts(self, tokenizer: LoadedTokenizer) -> list[pb.TokenText]:
        """Decode the tokens. Takes about 10 microseconds per token."""
        ids, first = self.ids, self.first
        special = {index for index, token in enumerate(ids) if tokenizer.is_special(token)}
        cuts = {cut - first for cut in self.cuts} | special | {index + 1 for index in special}
        found = window_token_texts(ids, tokenizer.decode_exactly, self.start - first, self.stop - first, cuts)
        return [
            pb.TokenText(
                start=each.start + first,
                stop=each.stop + first,
                text=utf8(each.text or ""),
                special=each.start in special,
            )
            for each in found
        ]


def rollout_window(rollout: Rollout, request: pb.DecodeTokensRequest) -> TokenWindow:
    """Return a copy of the tokens that are requested of a rollout. Raises `InvalidRequest`, `NotFound` and `OutOfRange`."""
    found = next((each for each in rollout.segments if each.id == request.segment_id), None)
    if found is None:
        return token_window(request, None, lambda start, stop: pack_tokens())
    return token_window(request, [span.stop for span in found.spans], found.ids)


def token_window(
    request: pb.DecodeTokensRequest, stops: Sequence[int] | None, ids: Callable[[int, int], Tokens]
) -> TokenWindow:
    """Return the tokens that are requested of a segment. Raises `InvalidRequest`, `NotFound` and `OutOfRange`.

    Args:
        request: the request.
        stops: where each span of the segment ends; None: there is no such segment.
        ids: returns the ids from one index to before another one.
    """
    start, stop = request.start, request.stop
    if stop and start > stop:
        raise InvalidRequest(Violation("stop", "must not be less than start"))
    if stop - start > MOST_TOKENS:
        raise InvalidRequest(
            Violation("stop", f"must be at most {MOST_TOKENS} tokens after start; request further windows")
        )
    if stops is None:
        text = f"the rollout has no segment {request.segment_id[:64]!r} with tokens so far"
        raise NotFound(text, reason="SEGMENT_NOT_FOUND")
    length = stops[-1] if stops else 0
    if max(start, stop) > length:
        raise OutOfRange(f"the segment has {length} tokens so far", reason="TOKENS_NOT_THERE")
    stop = stop or min(start + MOST_TOKENS, length)
    first, last = max(0, start - CONTEXT_TOKENS), min(length, stop + CONTEXT_TOKENS)
    return TokenWindow(ids(first, last), first, start, stop, tuple(cut for cut in stops if first < cut < last))
