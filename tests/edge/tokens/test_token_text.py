"""Windows of token texts: with the tokenizers of models, with tokens that are no text, and their cost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_server.edge.tokens.token_text import TokenText, split_token_texts, window_token_texts
from transformers import AutoTokenizer

from tests.support.tokenizers import FAMILIES, directory

TEXT = "  Hello  wörld 👩‍💻🏳️‍🌈 \n\n\tдва  三 ﷽ 𓀀 \u202e e\u0301 <b> don 't . 1234567 กำ end" * 4
# Bytes as tokens, as byte fallback has them, and some words.
WORDS = [bytes([byte]) for byte in range(256)] + [b" a", b"b", "é".encode(), "🙂".encode(), b""]


def of_bytes(ids: Sequence[int]) -> str:
    """Decode tokens that are bytes and words."""
    return b"".join(WORDS[token] for token in ids).decode("utf-8", "replace")


@pytest.mark.parametrize("family", FAMILIES)
def test_windows_of_any_size_show_the_texts_of_the_whole(family: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory(family))

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode([*ids], skip_special_tokens=False, clean_up_tokenization_spaces=False)  # type: ignore[no-any-return]

    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    cuts = {0, 3, 50}
    assert "".join(each.text or "" for each in window_token_texts(ids, decode, 0, len(ids))) == decode(ids)
    whole = split_token_texts(ids, decode, cuts)
    for size in (1, 2, 7, 64, len(ids)):
        for start in range(0, len(ids), size):
            stop = min(start + size, len(ids))
            expected = [each for each in whole if each.stop > start and each.start < stop]
            assert window_token_texts(ids, decode, start, stop, cuts) == expected


def covers(found: Sequence[TokenText], start: int, stop: int, length: int) -> bool:
    """Whether texts follow each other without gaps, and have the tokens from start to stop."""
    follow = all(one.stop == other.start for one, other in pairwise(found))
    return (
        follow and 0 <= found[0].start <= start < found[0].stop and found[-1].start < stop <= found[-1].stop <= length
    )


@given(st.lists(st.integers(0, len(WORDS) - 1), min_size=1, max_size=300), st.data())
@settings(max_examples=150)
def test_windows_of_what_is_no_text_have_all_tokens(ids: list[int], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(ids) - 1))
    stop = data.draw(st.integers(start + 1, len(ids)))
    cuts = data.draw(st.sets(st.integers(0, len(ids)), max_size=9))
    found = window_token_texts(ids, of_bytes, start, stop, cuts)
    assert covers(found, start, stop, len(ids))
    assert not any(each.start < cut < each.stop for each in found for cut in cuts)
    assert all(each.stop - each.start <= 16 for each in found)


def test_tokens_that_cannot_be_decoded_have_no_text() -> None:
    def fail(ids: Sequence[int]) -> str:
        raise OverflowError

    found = window_token_texts([2**31 - 1] * 100, fail, 40, 60)
    assert covers(found, 40, 60, 100)
    assert {each.text for each in found} == {None}
    assert window_token_texts([], fail, 0, 0) == window_token_texts([1, 2], fail, 1, 1) == []


@pytest.mark.parametrize("kind", ["text", "bytes that end no character", "nothing"])
def test_the_cost_grows_with_the_window_and_not_with_the_segment(kind: str) -> None:
    choose = random.Random(1)
    ids = {
        "text": [choose.choice((256, 257, 258, 259)) for _ in range(32_768)],
        "bytes that end no character": [0x80] * 32_768,
        "nothing": [260] * 32_768,
    }[kind]
    decoded = 0

    def counting(part: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(part)
        return of_bytes(part)

    for start in range(0, len(ids), 4096):
        window_token_texts(ids, counting, start, start + 4096)
    # Tokens that are text are decoded three times: alone, and with the token before. Others with up to 31 others.
    assert decoded < len(ids) * (4 if kind == "text" else 50)
