"""The trainer's ledger of one segment: every token with its author, and a checkpoint after each completion.

Digests are those of token.proto (Checkpoint). Two ledgers with equal digests agree on every token and author before that point.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from osmosis.rollout.v1 import token_pb2

from rollout_client.trainer.generation import MODEL_BIT, TurnImage

if TYPE_CHECKING:
    from hashlib import _Hash


@dataclass(frozen=True, slots=True)
class LedgerCheckpoint:
    """A checkpoint of a segment.

    Args:
        messages: number of messages in the conversation; 0: unknown.
        tokens: number of tokens in the segment.
        digest: SHA-256 over these tokens and their authors, 32 bytes.
    """

    messages: int
    tokens: int
    digest: bytes

    def to_proto(self) -> token_pb2.Checkpoint:
        """Convert to the protobuf message."""
        return token_pb2.Checkpoint(messages=self.messages, tokens=self.tokens, digest=self.digest)

    def matches(self, other: LedgerCheckpoint) -> bool:
        """Whether both checkpoints cover the same tokens and authors."""
        return (self.tokens, self.digest) == (other.tokens, other.digest)


@dataclass(frozen=True, slots=True)
class LedgerRun:
    """Consecutive tokens of one author in one turn.

    Args:
        turn: turn of the tokens, from 1.
        by_model: True for generated tokens.
        ids: token ids (uint32).
        logprobs: one natural logarithm (float32) per generated token; None: unknown or not generated.
        policy_version: policy version that generated them.
        own: True if this trainer generated them. False for generated tokens that were taken from the server's history.
        policy_step: step of that policy; None: unknown.
    """

    turn: int
    by_model: bool
    ids: array[int]
    logprobs: array[float] | None = None
    policy_version: str = ""
    own: bool = False
    policy_step: int | None = None

    def since(self, token: int) -> LedgerRun:
        """Return the run without its first `token` tokens."""
        logprobs = None if self.logprobs is None else self.logprobs[token:]
        return replace(self, ids=self.ids[token:], logprobs=logprobs)


class SegmentLedger:
    """Append-only ledger of one segment.

    `checkpoints` has one entry after each completion. `images` are those that its tokens stand for, in token mode. `inherited` is
    the number of leading tokens copied from another segment.
    `restarted` is True if a prompt that `render` returned did not extend the previous ledger, so this one began anew.
    """

    def __init__(self) -> None:
        self.runs: list[LedgerRun] = []
        self.checkpoints: list[LedgerCheckpoint] = []
        self.images: list[TurnImage] = []
        self.inherited = 0
        self.restarted = False
        self._ids = array("I")
        self._digest = hashlib.sha256()

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self._ids)

    @property
    def ids(self) -> array[int]:
        """All token ids, not copied. Callers must not modify the array."""
        return self._ids

    @property
    def complete(self) -> bool:
        """Whether this trainer generated all generated tokens of the segment, inherited ones aside."""
        start = 0
        for run in self.runs:
            if run.by_model and not run.own and start >= self.inherited:
                return False
            start += len(run.ids)
        return True

    def checkpoint(self, messages: int, more: Iterable[LedgerRun] = ()) -> LedgerCheckpoint:
        """Return the checkpoint after the ledger's tokens and `more`. `messages` is the number of messages it records."""
        digest, tokens = self._digest.copy(), self.tokens
        for run in more:
            _update_digest(digest, run)
            tokens += len(run.ids)
        return LedgerCheckpoint(messages, tokens, digest.digest())

    def append(self, runs: Iterable[LedgerRun]) -> None:
        """Append runs; empty ones are skipped."""
        for run in runs:
            if run.ids:
                self.runs.append(run)
                self._ids.extend(run.ids)
                _update_digest(self._digest, run)

    def adopt(self, runs: Sequence[LedgerRun]) -> None:
        """Append a history that the server sent, with a checkpoint after each completion in it."""
        for index, run in enumerate(runs):
            self.append((run,))
            after = runs[index + 1] if index + 1 < len(runs) else None
            if run.by_model and (after is None or not after.by_model or after.turn != run.turn):
                self.checkpoints.append(self.checkpoint(0))

    def new_runs(self, runs: Sequence[LedgerRun]) -> Sequence[LedgerRun] | None:
        """Return the runs by which a whole history extends this ledger; None if it does not extend it."""
        digest, left = hashlib.sha256(), self.tokens
        for index, run in enumerate(runs):
            if left < len(run.ids):
                _update_digest(digest, LedgerRun(run.turn, run.by_model, run.ids[:left]))
                found: Sequence[LedgerRun] = (run.since(left), *runs[index + 1 :])
                break
            _update_digest(digest, run)
            left -= len(run.ids)
        else:
            found = ()
            if left:
                return None
        return found if digest.digest() == self._digest.digest() else None

    def branch(self, at: LedgerCheckpoint) -> SegmentLedger:
        """Return a new ledger with the tokens of this one up to a checkpoint. They count as inherited and not as own."""
        made = SegmentLedger()
        left = at.tokens
        for run in self.runs:
            if left <= 0:
                break
            made.append((replace(run, ids=run.ids[:left], own=False),))
            left -= len(run.ids)
        made.inherited = made.tokens
        made.checkpoints = [checkpoint for checkpoint in self.checkpoints if checkpoint.tokens <= at.tokens]
        made.images = [image for image in self.images if (image.offset or 0) < at.tokens]
        return made

    def spans(self, offset: int) -> Iterator[token_pb2.Span]:
        """Convert the tokens from index `offset` on to protobuf spans."""
        start, opened = 0, False
        for run in self.runs:
            opened = opened or run.by_model
            skipped = min(max(0, offset - start), len(run.ids))
            start += len(run.ids)
            if skipped < len(run.ids):
                yield _to_span(run.since(skipped), opened=opened)


def runs_from_spans(spans: Iterable[token_pb2.Span]) -> list[LedgerRun]:
    """Convert protobuf spans, which must have been validated, to runs."""
    return [
        LedgerRun(
            span.turn,
            span.author == token_pb2.AUTHOR_MODEL,
            array("I", span.token_ids),
            array("f", span.logprobs.values) if span.HasField("logprobs") else None,
            span.policy_version,
            policy_step=span.policy_step if span.HasField("policy_step") else None,
        )
        for span in spans
        if span.token_ids
    ]


def _update_digest(digest: _Hash, run: LedgerRun) -> None:
    words = [token | MODEL_BIT for token in run.ids] if run.by_model else run.ids
    digest.update(struct.pack(f"<{len(words)}I", *words))


def _to_span(run: LedgerRun, *, opened: bool) -> token_pb2.Span:
    span = token_pb2.Span(
        turn=run.turn, token_ids=run.ids, policy_version=run.policy_version, policy_step=run.policy_step
    )
    if run.by_model:
        span.author = token_pb2.AUTHOR_MODEL
        if run.logprobs is not None:
            span.logprobs.values.extend(run.logprobs)
    else:
        span.author = token_pb2.AUTHOR_OTHER
        span.mask_reason = token_pb2.MASK_REASON_ENVIRONMENT if opened else token_pb2.MASK_REASON_PROMPT
    return span
