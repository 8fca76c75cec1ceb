"""Real tokenizers, and a plain trainer's way of counting with them."""

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rollout_server.core.ledger import pack_tokens
from rollout_server.core.message import Message
from rollout_server.core.record import Answered
from rollout_server.edge.tokens.cache import Tokenizers
from rollout_server.edge.tokens.loader import LoaderSettings
from rollout_server.edge.tokens.tokenizer import LoadedTokenizer
from rollout_server.testing.tokenizer import TOY_TOKENIZER

from tests.support.tokenizers import directory, real_tokenizer, tokenizer_of

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
                "required": ["a", "b"],
            },
        },
    }
]


def template(family: str) -> str | None:
    """The template of a family, if it is not its tokenizer's own."""
    if family != "qwen3-instruct":
        return None
    return real_tokenizer("qwen3/templates/qwen3_instruct_2507.jinja").read_text(encoding="utf-8")


@dataclass
class Plain:
    """A plain trainer: it renders everything with the library, from the messages as received."""

    tokenizer: Any

    def prompt(self, messages: Sequence[Any], tools: Any = None, **options: Any) -> list[int]:
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": False, "truncation": False} | options
        ids = self.tokenizer.apply_chat_template(list(messages), tools=tools, **options)
        return list(ids)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def answer(self, messages: Sequence[Any], tools: Any = None) -> list[int]:
        """The tokens that an append-only ChatML model generates for the last message, end token included."""
        prompt = self.tokenizer.apply_chat_template(messages[:-1], tools, tokenize=False, add_generation_prompt=True)
        whole = self.tokenizer.apply_chat_template(messages, tools, tokenize=False)
        assert whole.startswith(prompt)
        return self.ids(whole[len(prompt) :].removesuffix("\n"))


@pytest.fixture(scope="session")
def plain() -> Callable[[str], Plain]:
    """Plain rendering by family. Each tokenizer is created once, separately from the server's."""
    return cache(lambda family: Plain(tokenizer_of(directory(family), template(family))))


@pytest.fixture(scope="session")
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2, thread_name_prefix="renders") as threads:
        yield threads


@pytest.fixture(scope="session")
def ours(executor: ThreadPoolExecutor) -> Callable[..., LoadedTokenizer]:
    """The server's tokenizer of a family. `template_text` replaces its chat template."""
    loaded: dict[str, LoadedTokenizer] = {}

    def of(family: str, template_text: str | None = None) -> LoadedTokenizer:
        if template_text is None and family in loaded:
            return loaded[family]
        tokenizer = tokenizer_of(directory(family), template(family) or template_text)
        made = LoadedTokenizer(family, tokenizer, executor)
        if template_text is None:
            loaded[family] = made
        return made

    return of


@pytest.fixture
async def tokenizers() -> AsyncIterator[Callable[..., Tokenizers]]:
    """Create `Tokenizers` that are closed after the test."""
    made: list[Tokenizers] = []

    def make(directories: Mapping[str, Path] | None = None, **settings: Any) -> Tokenizers:
        settings = {"local_files_only": True} | settings
        made.append(Tokenizers(LoaderSettings(directories=directories or {"toy": TOY_TOKENIZER}, **settings)))
        return made[-1]

    yield make
    for each in made:
        await each.close()


def packed(*messages: Mapping[str, Any]) -> list[Message]:
    return [Message.parse(json.dumps(message, ensure_ascii=False)) for message in messages]


def answered(message: Mapping[str, Any], ids: Sequence[int] | None, finish_reason: str = "stop") -> Answered:
    return Answered(1, packed(message)[0], finish_reason, None if ids is None else pack_tokens(ids))


def call(arguments: Any, name: str = "add", call_id: str = "a1b2c3d4e") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
