"""Scripted conversation: a model adds numbers with one tool call per turn. A real tokenizer produces the token ids.

All completions are prepared here once, so that serving them costs the trainer almost no CPU.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import msgspec
from rollout_server.testing.checks.renderer import PlainRenderer
from rollout_server.testing.script import ScriptedReply, tool_call

from bench.programs.agents import lengthened

_SYSTEM = "You are a calculator. Use the tools, one call at a time, and give the result at the end."
_WORDS = (
    "account adds after again all amount and apples balance barn before between boxes brought by carried change clerk coins "
    "counted days delivered during each evening every field first for found from gave had harvest in into kept last left less "
    "made market merchant month more morning noted of on once only order other over paid pears per price received sacks second "
    "sent several shelf ship sold some store sum than that the their them then these third through to total town twice until "
    "wagon was week weighed were what when which while winter with without written year"
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One completion, and the request that must precede it.

    Args:
        body: the completion as an HTTP body.
        prompt: token ids of the whole prompt; `completion`, `logprobs`: those of the completion.
        reply: the completion as a message; `finish`: its finish reason.
        new_tokens: prompt tokens added since the previous completion, which is the length of the mask. 0 in the first turn.
        tail: the newest messages of the history: the previous completion and its tool result, or the opening messages.
    """

    body: bytes
    prompt: Sequence[int]
    completion: Sequence[int]
    logprobs: Sequence[float]
    reply: Mapping[str, Any]
    finish: str
    new_tokens: int
    tail: Sequence[Mapping[str, Any]]


class Facts(msgspec.Struct, frozen=True):
    """The beginning and the expected end of a conversation, for the driver. `prompt_tokens` has one length per turn."""

    opening: list[dict[str, Any]]
    messages: int
    closing: str
    prompt_tokens: list[int]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prepared conversation. `turns` is keyed by the number of messages in the history."""

    facts: Facts
    turns: Mapping[int, Turn]


@dataclass(frozen=True, slots=True)
class _Script:
    opening: list[dict[str, Any]]
    replies: list[ScriptedReply]
    results: list[dict[str, Any]]


def prepare(
    renderer: PlainRenderer, tools: Sequence[Mapping[str, Any]], turns: int, context: int, result_bytes: int = 0
) -> Conversation:
    """Prepare a conversation of `turns` completions whose prompts have `context` tokens on average.

    With `result_bytes`, each tool result is that much longer (`bench.programs.agents.Verbose`), and the context is as long as that
    makes it.

    If the conversation is that long without padding, it gets none. Raises ValueError if the chat template rewrites earlier
    turns, because a prompt would then not begin with the previous one.
    """
    bare = _render(renderer, tools, _script(turns, "", result_bytes))
    if result_bytes:
        return bare
    missing = context - fmean(bare.facts.prompt_tokens)
    return _render(renderer, tools, _script(turns, _padding(renderer, missing), 0))


def _script(turns: int, padding: str, result_bytes: int) -> _Script:
    numbers = [7 * step + 5 for step in range(1, turns + 1)]
    question = f"{padding}What is the sum of {', '.join(map(str, numbers))}?"
    opening = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": question}]
    replies, results, total = [], [], numbers[0]
    for index, number in enumerate(numbers[1:], start=1):
        arguments = json.dumps({"a": total, "b": number})
        call = tool_call(f"call_{index}", "add", arguments)
        replies.append(
            ScriptedReply(content=f"Adding {number} to {total}.", tool_calls=(call,), finish_reason="tool_calls")
        )
        total += number
        results.append({"role": "tool", "content": lengthened(str(total), result_bytes), "tool_call_id": call["id"]})
    replies.append(ScriptedReply(content=f"The sum of all numbers is {total}.\n#### {total}"))
    return _Script(opening, replies, results)


def _padding(renderer: PlainRenderer, tokens: float) -> str:
    sentences: list[str] = []
    for sentence in _sentences():
        if tokens <= 0:
            break
        sentences.append(sentence)
        tokens -= len(renderer.encode(sentence))
    return "".join(sentences) + "\n\n" if sentences else ""


def _sentences() -> Iterator[str]:
    """Yield random sentences, the same in every run. Repeated text would be unrealistically cheap to tokenize."""
    choose, vocabulary = random.Random(0), _WORDS.split()
    while True:
        words = choose.choices(vocabulary, k=choose.randint(7, 14))
        words.insert(choose.randrange(1, len(words)), str(choose.randint(2, 9999)))
        yield f"{' '.join(words).capitalize()}. "


def _render(renderer: PlainRenderer, tools: Sequence[Mapping[str, Any]], script: _Script) -> Conversation:
    history, tail = list(script.opening), list(script.opening)
    turns: dict[int, Turn] = {}
    seen: list[int] = []
    for index, reply in enumerate(script.replies):
        prompt = renderer.prompt(history, tools)
        if prompt[: len(seen)] != seen:
            raise ValueError("the chat template rewrites earlier turns; use another tokenizer for the benchmark")
        completion = renderer.completion_ids(history, tools, prompt, reply)
        new = len(prompt) - len(seen) if seen else 0
        turns[len(history)] = _turn(reply, prompt, completion, new, tail)
        seen = prompt + completion
        tail = [reply.message, *script.results[index : index + 1]]
        history += tail
    lengths = [len(turn.prompt) for turn in turns.values()]
    return Conversation(Facts(script.opening, len(history), str(script.replies[-1].content), lengths), turns)


def _turn(
    reply: ScriptedReply, prompt: list[int], ids: list[int], new_tokens: int, tail: Sequence[Mapping[str, Any]]
) -> Turn:
    sampled = random.Random(len(prompt))
    logprobs = [round(-sampled.expovariate(4), 7) for _ in ids]
    body = msgspec.json.encode(
        {
            "id": "bench",
            "object": "chat.completion",
            "created": 0,
            "model": "default",
            "choices": [{"index": 0, "message": reply.message, "finish_reason": reply.finish}],
            "token_ids": ids,
            "logprobs": logprobs,
            "prompt_token_ids": prompt,
        }
    )
    return Turn(body, prompt, ids, logprobs, reply.message, reply.finish, new_tokens, tail)
