"""Truncation of results by the rollout's own tokenizer."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_server import tool
from rollout_server.core.message import ToolCall
from rollout_server.core.spec import TokenizerName
from rollout_server.edge.tokens.cache import Tokenizers
from rollout_server.edge.tokens.loader import LoaderSettings
from rollout_server.edge.tools.token_count import TokenizerTokenCounter, fitting
from rollout_server.runtime.tools.executor import ToolExecutor
from rollout_server.runtime.tools.resources import ToolResources
from rollout_server.testing.tokenizer import TOY_TOKENIZER

NAME = TokenizerName("toy", "")


@pytest.fixture
async def tokenizers() -> AsyncIterator[Tokenizers]:
    made = Tokenizers(LoaderSettings(directories={"toy": TOY_TOKENIZER}, local_files_only=True))
    yield made
    await made.close()


@pytest.mark.parametrize(
    "text",
    [
        "one two three four five " * 200,
        "😀é€" * 300,
        " " * 3000,
        "x" * 3000,
        "word\n" + "€" * 2000,
        "x" * 5 + "😀" * 900,
    ],
)
async def test_a_result_has_no_more_tokens_than_it_may_and_few_less(tokenizers: Tokenizers, text: str) -> None:
    @tool(max_output_tokens=200)
    async def tell() -> str:
        return text

    loaded = await tokenizers.load(NAME)
    box = ToolExecutor((tell,), ToolResources(measure=TokenizerTokenCounter(tokenizers)), NAME)
    told = (await box.run(ToolCall("c", "tell", "{}"))).text
    kept, note, _ = told.rpartition("\n[Cut: ")
    if len(loaded.encode(text)) <= 200:
        assert told == text
        return
    assert note
    assert text.startswith(kept)
    assert 190 <= len(loaded.encode(kept)) <= 200
    assert f"the last {len(text) - len(kept):,} of {len(text):,} characters" in told


async def test_a_result_that_fits_stays_as_it_is(tokenizers: Tokenizers) -> None:
    loaded = await tokenizers.load(NAME)
    text = "one two three " * 50
    measure = TokenizerTokenCounter(tokenizers)
    assert await measure.fitting(NAME, text, len(loaded.encode(text))) == len(text)


@pytest.mark.parametrize(("name", "text"), [(TokenizerName("unknown", ""), "x" * 100), (NAME, "\ud800" * 100)])
async def test_characters_count_where_tokens_cannot(tokenizers: Tokenizers, name: TokenizerName, text: str) -> None:
    @tool(max_output_tokens=10)
    async def tell() -> str:
        return text

    box = ToolExecutor((tell,), ToolResources(measure=TokenizerTokenCounter(tokenizers)), name)
    told = (await box.run(ToolCall("c", "tell", "{}"))).text
    assert told.startswith(text[:40] + "\n[Cut: the last 60 of 100 characters are missing]")


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), max_size=200), st.integers(1, 100))
def test_the_start_that_fits_does_fit_and_little_more_would(costs: list[int], tokens: int) -> None:
    """Characters that cost some tokens each; together they never cost less."""
    text = "".join(chr(65 + cost) for cost in costs)

    def count(part: str) -> int:
        return sum(ord(character) - 65 for character in part)

    kept = fitting(count, text, tokens)
    assert count(text[:kept]) <= tokens
    assert kept == len(text) or count(text[: kept + 1]) > tokens or tokens - count(text[:kept]) <= 5
