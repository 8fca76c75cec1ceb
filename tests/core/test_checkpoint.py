"""Digests over tokens and their authors, against the specification in token.proto."""

from __future__ import annotations

import hashlib
import struct

from hypothesis import given
from hypothesis import strategies as st
from rollout_server.core.checkpoint import Checkpoint, LedgerDigest
from rollout_server.core.ledger import MAX_TOKEN_ID, Author, pack_tokens

RUNS = st.lists(st.tuples(st.lists(st.integers(0, MAX_TOKEN_ID), max_size=5), st.sampled_from(Author)), max_size=6)


def plainly(runs: list[tuple[list[int], Author]]) -> bytes:
    words = [token | (author is Author.MODEL) << 31 for ids, author in runs for token in ids]
    return hashlib.sha256(b"".join(struct.pack("<I", word) for word in words)).digest()


@given(RUNS, st.integers(0, 9))
def test_it_is_the_contracts_digest(runs: list[tuple[list[int], Author]], messages: int) -> None:
    digest = LedgerDigest()
    for ids, author in runs:
        digest.add(pack_tokens(ids), author)
    assert digest.checkpoint(messages) == Checkpoint(messages, sum(len(ids) for ids, _ in runs), plainly(runs))


@given(RUNS)
def test_chunks_do_not_matter_and_authors_do(runs: list[tuple[list[int], Author]]) -> None:
    whole, single = LedgerDigest(), LedgerDigest()
    for ids, author in runs:
        whole.add(pack_tokens(ids), author)
        for token in ids:
            single.add(pack_tokens([token]), author)
    assert whole.checkpoint(1) == single.checkpoint(1)
    others = LedgerDigest()
    for ids, author in runs:
        others.add(pack_tokens(ids), Author.OTHER if author is Author.MODEL else Author.MODEL)
    assert (others.checkpoint(1) == whole.checkpoint(1)) == (not whole.tokens)


@given(RUNS, RUNS)
def test_a_copy_goes_on_by_itself(runs: list[tuple[list[int], Author]], more: list[tuple[list[int], Author]]) -> None:
    digest = LedgerDigest()
    for ids, author in runs:
        digest.add(pack_tokens(ids), author)
    before, copy = digest.checkpoint(0), digest.copy()
    for ids, author in more:
        copy.add(pack_tokens(ids), author)
    assert digest.checkpoint(0) == before
    assert copy.checkpoint(0).digest == plainly([*runs, *more])
