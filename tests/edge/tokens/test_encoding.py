"""Encoding only the changed part equals encoding everything, for any two texts and every tokenizer."""

import os
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollout_server.core.ledger import pack_tokens
from rollout_server.edge.tokens import encoding
from rollout_server.edge.tokens.encoding import Encoded, GrowingEncoder, RecentOpenings, common_prefix, composes
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from tests.support.tokenizers import FAMILIES

PIECES = (
    "<|im_end|>",
    "<|im_start|>",
    "</s>",
    "<s>",
    "[INST]",
    "<|end|>",
    "<|end",
    "|>",
    "<",
    "<|",
    "<think>",
    "<tool_call>",
)
TEXTS = st.lists(
    st.sampled_from((*PIECES, " ", "  ", "\n", "é", "e\u0301", "\u200d", "😀", "1234", "word", " Word", "▁"))
    | st.text(max_size=3),
    max_size=12,
).map("".join)
EXAMPLES = 10 if os.environ.get("ROLLOUT_EXAMPLES") == "few" else 60
SOME = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@dataclass
class Added:
    content: str
    special: bool = True
    normalized: bool = False
    single_word: bool = False


@pytest.mark.parametrize("family", FAMILIES)
@SOME
@given(data=st.data())
def test_any_text_after_any_other(ours, plain, family, data) -> None:
    tokens = [token.content for token in plain(family).tokenizer.added_tokens_decoder.values()][:40]
    texts = st.lists(TEXTS | st.sampled_from(tokens), max_size=6).map("".join)
    before, behind = data.draw(texts), data.draw(texts)
    after = before[: data.draw(st.integers(0, len(before)))] + behind
    loaded = ours(family)
    grown = loaded.grow(loaded.grow(Encoded(), before), after)
    assert grown == loaded.grow(Encoded(), after)
    assert grown.ids == pack_tokens(plain(family).ids(after))


def words(*added: AddedToken, normalizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2, "<x>y": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens(list(added))
    return tokenizer


def growing(tokenizer: Tokenizer) -> GrowingEncoder:
    added = {
        index: Added(token.content, token.special, token.normalized, token.single_word)
        for index, token in tokenizer.get_added_tokens_decoder().items()
    }
    return GrowingEncoder(tokenizer, added)


def test_a_longer_token_that_begins_at_the_same_place_wins() -> None:
    tokenizer = words(AddedToken("<x>", normalized=False), AddedToken("<x>b", normalized=False))
    encoder = growing(tokenizer)
    before = encoder.whole("a <x>")
    assert encoder.grown(before, "a <x>b a").ids == pack_tokens(tokenizer.encode("a <x>b a").ids)
    assert list(before.ids) != list(encoder.grown(before, "a <x>b a").ids)[: len(before.ids)]


def test_a_token_that_takes_the_spaces_around_it() -> None:
    tokenizer = words(AddedToken("<x>", lstrip=True, rstrip=True, normalized=False))
    encoder = growing(tokenizer)
    before = encoder.whole("a   <x>  ")
    for after in ("a   <x>   b", "a   <x>", "a   b"):
        assert encoder.grown(before, after) == encoder.whole(after)


def test_a_token_that_the_next_character_makes_a_part_of_a_word_is_no_place_to_cut() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.train_from_iterator(["-<x>b"], trainers.BpeTrainer(show_progress=False))
    tokenizer.add_tokens([AddedToken("<x>", single_word=True, normalized=False)])
    encoder = growing(tokenizer)
    assert encoder.grown(encoder.whole("-<x> b"), "-<x>b").ids == pack_tokens(tokenizer.encode("-<x>b").ids)


def test_a_token_that_only_the_normalised_text_holds_is_no_place_to_cut() -> None:
    tokenizer = words(
        AddedToken("<x>", normalized=False), AddedToken("<y>", normalized=True), normalizer=normalizers.Lowercase()
    )
    whole = growing(tokenizer).whole("a <Y> b <x> a")
    assert list(whole.starts) == [8]


def test_what_does_not_compose_is_found_out() -> None:
    """A tokenizer that reads its text twice, so that no part can be encoded separately."""
    tokenizer = words(AddedToken("<x>", normalized=False))
    encoder = growing(tokenizer)
    assert composes(encoder, "a<x>b<x>a", lambda text: pack_tokens(tokenizer.encode(text).ids))
    assert not composes(encoder, "a<x>b<x>a", lambda text: pack_tokens(tokenizer.encode(text + text).ids))


@given(st.text(max_size=20), st.text(max_size=20), st.text(max_size=20))
def test_common_prefix(shared: str, a: str, b: str) -> None:
    length = common_prefix(shared + a, shared + b)
    assert (shared + a)[:length] == (shared + b)[:length]
    assert (shared + a)[length : length + 1] != (shared + b)[length : length + 1] or (shared + a) == (shared + b)


def test_a_token_that_is_looked_for_in_the_normalised_text_is_no_place_to_cut_as_it_stands_either() -> None:
    tokenizer = words(AddedToken("<y>", normalized=True), AddedToken("<x>", normalized=False))
    assert list(growing(tokenizer).whole("a <y> b <x> a").starts) == [8]


def test_what_stands_behind_a_token_is_only_told_where_that_token_stands() -> None:
    tokenizer = words(AddedToken("<x>", normalized=False), AddedToken("<y>", normalized=False))
    encoded = growing(tokenizer).whole("a <x> b <y> a")
    x, y = tokenizer.token_to_id("<x>"), tokenizer.token_to_id("<y>")
    assert encoded.behind(x, 2) == pack_tokens([1, y, 0])
    assert encoded.behind(y, 8) == pack_tokens([0])
    for token, start in ((x, 0), (x, 1), (x, 3), (x, 8), (y, 2), (y, 3), (y, 7), (y, 9), (0, 8), (y, 13)):
        assert encoded.behind(token, start) is None


def test_what_did_not_change_is_not_encoded_again() -> None:
    class Noting:
        def __init__(self, tokenizer: Tokenizer) -> None:
            self.tokenizer = tokenizer
            self.texts: list[str] = []

        def encode(self, text: str, **options: Any) -> Any:
            self.texts.append(text)
            return self.tokenizer.encode(text, **options)

    noting = Noting(words(AddedToken("<x>", normalized=False)))
    encoder = GrowingEncoder(noting, {4: Added("<x>")})
    before = encoder.whole("a <x> b <x> a <x> b")
    noting.texts.clear()
    assert list(encoder.grown(before, "a <x> b <x> a <x> b b").ids) == [0, 4, 1, 4, 0, 4, 1, 1]
    assert list(encoder.grown(before, "a <x> b <x> a <x>").ids) == [0, 4, 1, 4, 0, 4]
    assert list(encoder.grown(before, "a <x> b <x> a <x").ids) == [0, 4, 1, 4, 0, 2]
    assert list(encoder.grown(before, "a <x> b <x").ids) == [0, 4, 1, 2]
    assert encoder.grown(before, before.text) is before
    assert noting.texts == ["<x> b b", "<x>", "<x> a <x", "<x> b <x"]


def test_recent_openings_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_OPENING_CHARACTERS", 10)
    openings = RecentOpenings()
    for text in ("aaaa", "bbbb", "aaaa", "cccc", "d" * 6):
        openings.add(Encoded(text))
    assert set(openings._known) == {"aaaa", "cccc"}
    assert openings.closest("aaaa").text == "aaaa"
    assert openings.closest("other").text == "cccc"
