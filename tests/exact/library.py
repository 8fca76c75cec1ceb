"""The trainer library with a scripted model whose completions are its own token ids."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollout_client import AsyncClient
from rollout_client.trainer import Finished, Generated, ParsedCompletion, Prompt, SamplingParams, ToolCall, Trainer
from rollout_server.testing.checks.renderer import PlainRenderer, Tools, UnrenderableError
from rollout_server.testing.script import ScriptedReply

from tests.exact.conversations import KINDS, Conversation, Exchange


class Model:
    """Return scripted completions, turn by turn, as ids of the tokenizer. Every third completion includes its end token."""

    def __init__(self, tokenizer: Any, exchanges: Sequence[Exchange]) -> None:
        self.tokenizer = tokenizer
        self.exchanges = exchanges
        self.turn = 0

    async def __call__(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> Generated:
        reply = self.exchanges[self.turn].reply
        said = f"{reply.reasoning or ''}{reply.content}{json.dumps(reply.tool_calls)}"
        ids = self.tokenizer.encode(said, add_special_tokens=False)
        end = [self.tokenizer.eos_token_id] if self.turn % 3 == 0 else []
        logprobs = [-((len(prompt_ids) + at) % 97 + 1) / 128 for at in range(len(ids) + len(end))]
        return Generated([*ids, *end], logprobs, "stop", f"policy-{self.turn // 20}")

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(ids))
        return text

    def parse(self, text: str) -> ParsedCompletion:
        """Return the scripted reply, whatever the text is: with arbitrary ids the text may be anything."""
        reply, self.turn = self.exchanges[self.turn].reply, self.turn + 1
        calls = [called(call) for call in reply.tool_calls]
        assert isinstance(reply.content, str)
        return ParsedCompletion(reply.content, calls, reply.reasoning)


def called(call: Mapping[str, Any]) -> ToolCall:
    function = call["function"]
    return ToolCall(function["name"], function["arguments"], call["id"])


def plain(exchange: Exchange) -> Exchange:
    """The exchange in the form that `ParsedCompletion` can express: content and arguments are texts."""
    reply = exchange.reply
    calls = []
    for call in reply.tool_calls:
        function: Any = call["function"]
        given = function["arguments"]
        text = given if isinstance(given, str) else json.dumps(given)
        calls.append({**call, "function": {**function, "arguments": text}})
    return replace(
        exchange, reply=ScriptedReply(content=reply.content or "", tool_calls=tuple(calls), reasoning=reply.reasoning)
    )


def sayable(renderer: PlainRenderer, asked: Sequence[Any], tools: Tools, turns: int) -> Conversation:
    """`turns` exchanges that the template accepts in sequence; fewer if it accepts few."""
    made = Conversation(list(asked))
    said = list(asked)
    for exchange in map(plain, itertools.islice(KINDS["mixed"](), 150)):
        more = [*said, exchange.reply.message, *exchange.heard()]
        try:
            renderer.text(more, tools)
        except UnrenderableError:
            continue
        made.exchanges.append(exchange)
        said = more
        if len(made.exchanges) == turns:
            break
    return made


async def by_library(client: AsyncClient, tokenizer: Any, written: Conversation, mode: str) -> Finished:
    """Run a conversation over a trainer stream."""
    model, renderer = Model(tokenizer, written.exchanges), PlainRenderer(tokenizer)

    def render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> Sequence[int]:
        return renderer.prompt(messages, tools or None)

    renders = {"render": render} if mode == "messages" else {}
    trainer = Trainer(client, generate=model, decode=model.decode, parse=model.parse, **renders)  # type: ignore[arg-type]
    prompt = Prompt(written.asked, metadata=written.metadata)
    named = "model" if mode == "tokens" else None
    async with trainer:
        groups = trainer.rollouts([prompt], n=1, tokenizer=named, limits={"turns": 100}, token_mode=mode)  # type: ignore[arg-type]
        (group,) = [each async for each in groups]
    return group.rollouts[0]
