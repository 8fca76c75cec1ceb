"""Checkpoints of token mode: a digest of the tokens that both server and trainer hold (D15)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from rollout_server.core.ledger import Author, Tokens, pack_tokens

_MODEL_BIT = 1 << 31
_BIG_ENDIAN = pack_tokens([1]).tobytes()[0] == 0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The first part of a segment: its number of messages, its number of tokens, and the 32-byte digest of the tokens."""

    messages: int
    tokens: int
    digest: bytes


class LedgerDigest:
    """Incremental SHA-256 over a segment's tokens and their authors.

    Each token contributes one little-endian uint32, `id | model_bit << 31`, so the digest does not depend on how the tokens are
    chunked.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._hash = hashlib.sha256()

    def add(self, ids: Tokens, author: Author) -> None:
        """Append tokens of one author. The cost depends on `ids` only, not on the tokens before."""
        values = pack_tokens(token | _MODEL_BIT for token in ids) if author is Author.MODEL else ids[:]
        if _BIG_ENDIAN:
            values.byteswap()
        self._hash.update(values.tobytes())
        self.tokens += len(ids)

    def copy(self) -> LedgerDigest:
        """Return an independent copy."""
        other = LedgerDigest()
        other.tokens, other._hash = self.tokens, self._hash.copy()
        return other

    def checkpoint(self, messages: int) -> Checkpoint:
        """Return the checkpoint of all tokens so far, after `messages` messages."""
        return Checkpoint(messages, self.tokens, self._hash.digest())
