"""A scripted model behind a real tokenizer and chat template: it renders, generates ids and records both."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from rollout_client.trainer.completion import ParsedCompletion
from rollout_client.trainer.parsers import hermes, thinking
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from transformers import AutoTokenizer

END = "<|im_end|>"


class TooLong(Exception):
    """Prompt and completion do not fit into the context."""


@dataclass(frozen=True)
class Generated:
    """One generation: the prompt ids and the sampled ids, logprobs and finish reason."""

    prompt: list[int]
    ids: list[int]
    logprobs: list[float]
    finish: str


@cache
def toy() -> Any:
    """The built-in tokenizer, as loaded by transformers."""
    return AutoTokenizer.from_pretrained(TOY_TOKENIZER)


@dataclass
class EngineModel:
    """Generate the texts in `says`, one per call; repeat the last one.

    With `odd`, it samples one token per character, as no tokenizer would encode the text. The first `aborts` generations
    are aborted. `generate` may receive ids that `render` did not return: in token mode the caller renders.
    """

    says: Sequence[str]
    odd: bool = False
    context: int = 100_000
    aborts: int = 0
    seen: list[Generated] = field(default_factory=list)
    tokenizer: Any = field(default_factory=toy)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any, kwargs: Mapping[str, Any]) -> list[int]:
        shown = [_parsed(message) for message in messages]
        given = tools or None
        ids = self.tokenizer.apply_chat_template(
            shown, tools=given, add_generation_prompt=True, return_dict=False, **kwargs
        )
        return list(ids)

    def generate(self, prompt: Sequence[int], most: int | None = None) -> Generated:
        if len(prompt) + (most or 1) > self.context:
            raise TooLong
        if self.aborts:
            self.aborts -= 1
            return Generated(list(prompt), self.encode("Hal"), [-1.0] * len(self.encode("Hal")), "abort")
        most = min(most or self.context, self.context - len(prompt))
        text = self.next_text(prompt)
        ids = [token for each in text for token in self.encode(each)] if self.odd else self.encode(text)
        ids += self.encode(END)
        finish = "stop"
        if len(ids) > most:
            ids, finish = ids[:most], "length"
        generated = Generated(list(prompt), ids, [-(1 + index) / 64 for index in range(len(ids))], finish)
        self.seen.append(generated)
        return generated

    def next_text(self, prompt: Sequence[int]) -> str:
        return self.says[min(len(self.seen), len(self.says) - 1)]

    def read(self, ids: Sequence[int]) -> ParsedCompletion:
        """Parse sampled ids, without the end token, as an engine's parsers do."""
        return thinking(hermes)(self.tokenizer.decode(list(ids)).removesuffix(END))

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def text(self, token: int) -> str:
        return str(self.tokenizer.decode([token]))


def calls_of(answer: ParsedCompletion, turn: int) -> list[dict[str, Any]]:
    """Tool calls in OpenAI's format."""
    return [
        {"id": f"call_{turn}_{index}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for index, call in enumerate(answer.tool_calls)
    ]


def _parsed(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as engines pass it to templates: arguments are objects."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)
