"""The judge of token mode on real templates: golden environments pass, and each incorrect one is reported."""

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rollout_server.testing.checks.renderer import PlainRenderer
from rollout_server.testing.checks.token_mode_check import PromptSpan, TokenModeCheck, TokenPrompt
from transformers import AutoTokenizer

from tests.support.tokenizers import VECTORS, real_tokenizer

WRONG_EVERY = 3
"""Incorrect environments are tried on every n-th row only, because each needs several renderings."""


@pytest.fixture(scope="module")
def rendering() -> Iterator[Callable[..., PlainRenderer]]:
    """A renderer of a tokenizer with one of its templates; each is loaded once."""
    load = cache(AutoTokenizer.from_pretrained)

    def make(name: str, template: str, kwargs: dict[str, Any]) -> PlainRenderer:
        tokenizer = load(real_tokenizer(name))
        tokenizer.chat_template = real_tokenizer(f"{name}/{template}").read_text(encoding="utf-8")
        return PlainRenderer(tokenizer, template_kwargs=kwargs)

    yield make
    load.cache_clear()


def case(
    row: dict[str, Any], renderer: PlainRenderer, environment: list[int] | None = None
) -> tuple[list[Any], TokenPrompt]:
    """The case of a golden row, or the same with another environment."""
    held = row["tito_prompt_ids"] + row["generated_ids"]
    cut = bool(row["missing_stop"])
    closing = renderer.encode(row["stop"]) if cut else []
    new = [*closing, *(row["env_ids"] if environment is None else environment)]
    stop = len(held) + len(new)
    return row["messages"], TokenPrompt(
        held + new, (PromptSpan(2, len(held), stop, len(row["messages"]), row["first_env"] - 1, len(closing), cut),)
    )


def wrong(right: list[int]) -> dict[str, list[int]]:
    """Environments that a careless server might send."""
    middle = len(right) // 2
    return {
        "one more": [*right, right[-1]],
        "one less": right[:-1],
        "first missing": right[1:],
        "first twice": [right[0], *right],
        "other token": [*right[:middle], right[middle] ^ 1, *right[middle + 1 :]],
        "nothing": [],
    }


@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_golden_environments(rendering: Callable[..., PlainRenderer], path: Path) -> None:
    header, *rows = map(json.loads, real_tokenizer(f"vectors/{path.name}").read_text(encoding="utf-8").splitlines())
    tools = json.loads(real_tokenizer("vectors/tools.json").read_text(encoding="utf-8"))
    renderer = rendering(header["tokenizer"], header["template"], header["template_kwargs"])
    judge = TokenModeCheck(renderer)
    for index, row in enumerate(rows):
        where = (row["case"], row["turn"])
        messages, given = case(row, renderer)
        assert judge.fault(messages, tools, given) is None, (where, judge.fault(messages, tools, given))
        for what, environment in wrong(row["env_ids"]).items() if index % WRONG_EVERY == 0 else ():
            messages, given = case(row, renderer, environment)
            fault = judge.fault(messages, tools, given)
            assert fault is not None, (where, what)
            assert fault.startswith("turn 2: token "), (where, what)
