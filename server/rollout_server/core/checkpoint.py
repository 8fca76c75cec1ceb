"""Checkpoints: what both sides of token mode hold, told in 32 bytes (D15)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from rollout_server.core.ledger import Author, Tokens, pack_tokens

_MODEL_BIT = 1 << 31
_BIG_ENDIAN = pack_tokens([1]).tobytes()[0] == 0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A stretch of a segment from its first token on: its messages, its tokens and their digest."""

    messages: int
    tokens: int
    digest: bytes


class LedgerDigest:
    """SHA-256 over one little-endian uint32 for each token, `id | (the model wrote it) << 31`, however they are chunked."""

    def __init__(self) -> None:
        self.tokens = 0
        self._hash = hashlib.sha256()

    def add(self, ids: Tokens, author: Author) -> None:
        """Extends it, at a cost that does not grow with what came before."""
        words = pack_tokens(token | _MODEL_BIT for token in ids) if author is Author.MODEL else ids[:]
        if _BIG_ENDIAN:
            words.byteswap()
        self._hash.update(words.tobytes())
        self.tokens += len(ids)

    def copy(self) -> LedgerDigest:
        """One that goes on by itself."""
        other = LedgerDigest()
        other.tokens, other._hash = self.tokens, self._hash.copy()
        return other

    def checkpoint(self, messages: int) -> Checkpoint:
        """Where it stands, after so many messages."""
        return Checkpoint(messages, self.tokens, self._hash.digest())
