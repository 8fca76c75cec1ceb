"""Token texts with real tokenizers: byte-level, with byte fallback, and with another spelling at the start of a text."""

from __future__ import annotations

import pytest
from rollout_server.edge.tokens.token_text import split_token_texts
from transformers import AutoTokenizer

from tests.support.tokenizers import FAMILIES, directory

TEXT = "  Hello  wörld 👩‍💻🏳️‍🌈 \n\n\tдва  三 ﷽ \u202e e\u0301 <b> don 't . \x1b[0m 1234567 �end"


@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_are_the_whole_text_and_mostly_single_tokens(family: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory(family))

    def decode(ids: object) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)  # type: ignore[no-any-return]

    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    found = split_token_texts(ids, decode)
    assert "".join(piece.text or "" for piece in found) == decode(ids)
    assert len(found) > len(ids) / 3
    cuts = range(0, len(ids), 5)
    assert all(piece.stop - piece.start <= 5 for piece in split_token_texts(ids, decode, cuts))
