"""Asks for rollouts, and looks at how each of them ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

import aiohttp
import grpc
import msgspec
from osmosis.rollout.v1 import event_pb2, message_pb2, rollout_service_pb2, rollout_service_pb2_grpc, spec_pb2

from bench.conversation import Facts

if TYPE_CHECKING:
    from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceAsyncStub

TOKENIZER = "bench/tokenizer"
"""The name under which the server knows the tokenizer."""

_MAX_TOKENS_TOTAL = 1_000_000


class WrongRollout(Exception):
    """A rollout that did not end as its script says."""


class Player(Protocol):
    """Plays one rollout. Raises `WrongRollout`."""

    def __call__(self) -> Awaitable[None]: ...


@dataclass(frozen=True, slots=True)
class Order:
    """What is asked for: the conversation, and the trainer's URL for it."""

    trainer: str
    facts: Facts

    @property
    def turns(self) -> int:
        """Completions that it takes."""
        return len(self.facts.prompt_tokens)


class _Metrics(msgspec.Struct):
    num_llm_calls: int


class _Answer(msgspec.Struct):
    status: str
    finish_reason: str
    final_messages: list[msgspec.Raw]
    metrics: _Metrics
    error_message: str | None = None


async def play_many(play: Player, rollouts: int, concurrency: int) -> None:
    """Plays rollouts, so many at a time. Raises the first `WrongRollout` and gives up the others."""
    numbers = iter(range(rollouts))

    async def play_on() -> None:
        for _ in numbers:
            await play()

    players = [asyncio.create_task(play_on()) for _ in range(min(concurrency, rollouts))]
    try:
        await asyncio.gather(*players)
    finally:
        for player in players:
            player.cancel()


def http_player(http: aiohttp.ClientSession, server: str, order: Order) -> Player:
    """Plays over `POST /rollout`."""
    body = {
        "server_url": order.trainer,
        "messages": order.facts.opening,
        "sampling_params": {"temperature": 1.0, "top_p": 1.0, "max_tokens": 512, "logprobs": True},
        "tokenizer_name": TOKENIZER,
        "max_turns": order.turns,
        "max_tokens_total": _MAX_TOKENS_TOTAL,
    }
    rest, ids = msgspec.json.encode(body)[1:], count(1)
    decoder = msgspec.json.Decoder(_Answer)

    async def play() -> None:
        content = b'{"rollout_id":"bench-%d",%s' % (next(ids), rest)
        headers = {"content-type": "application/json"}
        try:
            async with http.post(f"{server}/rollout", data=content, headers=headers) as response:
                text = await response.read()
        except aiohttp.ClientError as error:
            raise WrongRollout(f"no answer: {error!r}") from error
        if response.status != 200:
            raise WrongRollout(f"HTTP {response.status}: {text[:500].decode(errors='replace')}")
        answer = decoder.decode(text)
        if answer.status != "COMPLETED":
            raise WrongRollout(f"{answer.status}: {answer.error_message}")
        _check(order, answer.finish_reason, answer.metrics.num_llm_calls, answer.final_messages)

    return play


def grpc_player(channel: grpc.aio.Channel, order: Order) -> Player:
    """Plays over `RunRollout`, with the outcome as the only event, which is what `POST /rollout` asks for, too."""
    stub: RolloutServiceAsyncStub = rollout_service_pb2_grpc.RolloutServiceStub(channel)
    spec = _spec(order)
    ids = count(1)

    async def play() -> None:
        spec.rollout_id = f"bench-{next(ids)}"
        start = rollout_service_pb2.StartRolloutRequest(spec=spec)
        asked = rollout_service_pb2.RunRolloutRequest(start=start, detail=event_pb2.EVENT_DETAIL_OUTCOME)
        try:
            ends = [item.event.finished.outcome async for item in stub.RunRollout(asked) if item.HasField("event")]
        except grpc.aio.AioRpcError as error:
            raise WrongRollout(f"{error.code().name}: {error.details()}") from error
        if len(ends) != 1:
            raise WrongRollout(f"the stream held {len(ends)} events")
        outcome = ends[0]
        if outcome.WhichOneof("end") != "stop":
            raise WrongRollout(f"{outcome.WhichOneof('end')}: {outcome.failure.message or outcome.cancellation.reason}")
        messages = [message.json.encode() for message in outcome.messages]
        _check(order, outcome.stop.reason, outcome.metrics.turns, messages)

    return play


def _spec(order: Order) -> spec_pb2.RolloutSpec:
    texts = [msgspec.json.encode(message).decode() for message in order.facts.opening]
    return spec_pb2.RolloutSpec(
        messages=[message_pb2.Message(json=text) for text in texts],
        completions=spec_pb2.Target(url=order.trainer),
        tokenizer=spec_pb2.Tokenizer(name=TOKENIZER),
        sampling=spec_pb2.Sampling(temperature=1.0, top_p=1.0, max_tokens=512, logprobs=True),
        limits=spec_pb2.Limits(turns=order.turns, generated_tokens=_MAX_TOKENS_TOTAL),
    )


def _check(order: Order, reason: str, turns: int, messages: Sequence[bytes | msgspec.Raw]) -> None:
    if (reason, turns, len(messages)) != ("stop", order.turns, order.facts.messages):
        raise WrongRollout(
            f"ended with {reason!r} after {turns} turns and {len(messages)} messages, "
            f"not with 'stop' after {order.turns} and {order.facts.messages}"
        )
    last: Mapping[str, Any] = msgspec.json.decode(messages[-1])
    if last.get("content") != order.facts.closing:
        raise WrongRollout(f"the last message says {last.get('content')!r}, not {order.facts.closing!r}")
