"""The texts around the position where a reported prompt diverges from the expected one."""

from typing import Any

import pytest
from rollout_server.core.ledger import Ledger, Prediction, Tokens, Turn, pack_tokens
from rollout_server.edge.tokens.drift_excerpt import drift_excerpt

NOTHING = pack_tokens()


@pytest.fixture
def ids(ours: Any) -> Any:
    return lambda text: ours("toy").encode(text)


class Excerpts:
    """The excerpts of one conversation, turn by turn."""

    def __init__(self, loaded: Any) -> None:
        self._loaded = loaded
        self._ledger = Ledger().main

    async def around(self, predicted: Prediction, reported: "Tokens | None", answer: Tokens) -> tuple[str, str]:
        texts = await drift_excerpt(self._loaded, self._ledger, predicted, reported)
        self._ledger.commit(Turn(1, answer, None, predicted, reported))
        return texts


def behind(environment: Tokens, closing: Tokens = NOTHING) -> Prediction:
    return Prediction(closing, environment)


async def test_what_is_expected_says_nothing(ours, ids) -> None:
    parting = Excerpts(ours("toy"))
    first, answer, more = ids("Hello"), ids("Yes."), ids("<|im_end|>And?")
    assert await parting.around(behind(first), first, answer) == ("", "")
    assert await parting.around(behind(more[1:], more[:1]), first + answer + more, answer) == ("", "")


async def test_both_sides_are_told_around_the_first_difference(ours, ids) -> None:
    parting = Excerpts(ours("toy"))
    first, answer = ids("A" + " long" * 200), ids(" Yes.")
    assert await parting.around(behind(first), first, answer) == ("", "")
    expected, reported = await parting.around(behind(ids(" Tuesday")), first + answer + ids(" Friday"), answer)
    assert "Tuesday" in expected
    assert "Friday" in reported
    assert "Tuesday" not in reported
    assert all("Yes." in text and len(text) < 120 for text in (expected, reported))


async def test_a_prompt_that_is_cut_or_longer(ours, ids) -> None:
    parting = Excerpts(ours("toy"))
    first = ids("One two three four")
    assert await parting.around(behind(first), first[:-1], ids("x")) == (
        "One two three four",
        ours("toy").decode(first[:-1]),
    )
    longer = first[:-1] + ids("x") + ids(" five")
    expected, reported = await parting.around(behind(pack_tokens()), longer, ids("y"))
    assert reported == expected + " five"


async def test_after_a_prompt_that_is_not_reported_ours_goes_on(ours, ids) -> None:
    parting = Excerpts(ours("toy"))
    first, answer, more = ids("Hello"), ids("Yes."), ids("And?")
    assert await parting.around(behind(first), None, answer) == ("", "")
    assert await parting.around(behind(more), first + answer + more, answer) == ("", "")


async def test_long_texts_are_cut(ours, ids) -> None:
    parting = Excerpts(ours("toy"))
    spaces = ids(" " * 4000)
    expected, reported = await parting.around(behind(spaces), ids("x"), ids("y"))
    assert len(expected) <= 201
    assert reported == "x"


async def test_a_text_of_the_longest_length_is_shown_whole(ours, ids) -> None:
    for text, shown in (("<|endoftext|>" * 15 + "12345", ""), ("<|endoftext|>" * 15 + "123456", "…")):
        parting = Excerpts(ours("toy"))
        assert len(ids(text)) <= 24
        expected, _ = await parting.around(behind(ids(text)), ids("<|endoftext|>" * 8), ids("y"))
        assert expected == text[:200] + shown
