"""Load driver: starts rollouts and checks the outcome of each."""

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
"""Name of the tokenizer in the server's settings."""

_MAX_TOKENS_TOTAL = 1_000_000


class WrongRollout(Exception):
    """A rollout did not end as scripted."""


class Player(Protocol):
    """Runs one rollout per call. Raises `WrongRollout`."""

    def __call__(self) -> Awaitable[None]: ...


@dataclass(frozen=True, slots=True)
class Order:
    """A conversation to run, and the trainer's URL for it."""

    trainer: str
    facts: Facts

    @property
    def turns(self) -> int:
        """Number of completions."""
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
    """Run rollouts, `concurrency` at a time. Raises the first `WrongRollout` and cancels the others."""
    # All workers share one iterator, so each takes the next rollout as soon as it is free.
    numbers = iter(range(rollouts))

    async def work() -> None:
        for _ in numbers:
            await play()

    workers = [asyncio.create_task(work()) for _ in range(min(concurrency, rollouts))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()


def http_player(http: aiohttp.ClientSession, server: str, order: Order) -> Player:
    """Return a player that runs rollouts over `POST /rollout`."""
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
            raise WrongRollout(f"no response: {error!r}") from error
        if response.status != 200:
            raise WrongRollout(f"HTTP {response.status}: {text[:500].decode(errors='replace')}")
        outcome = decoder.decode(text)
        if outcome.status != "COMPLETED":
            raise WrongRollout(f"{outcome.status}: {outcome.error_message}")
        _check(order, outcome.finish_reason, outcome.metrics.num_llm_calls, outcome.final_messages)

    return play


def grpc_player(channel: grpc.aio.Channel, order: Order) -> Player:
    """Return a player that runs rollouts over `RunRollout`. The outcome is the only event, as for `POST /rollout`."""
    stub: RolloutServiceAsyncStub = rollout_service_pb2_grpc.RolloutServiceStub(channel)
    spec = _spec(order)
    ids = count(1)

    async def play() -> None:
        spec.rollout_id = f"bench-{next(ids)}"
        start = rollout_service_pb2.StartRolloutRequest(spec=spec)
        request = rollout_service_pb2.RunRolloutRequest(start=start, detail=event_pb2.EVENT_DETAIL_OUTCOME)
        try:
            ends = [item.event.finished.outcome async for item in stub.RunRollout(request) if item.HasField("event")]
        except grpc.aio.AioRpcError as error:
            raise WrongRollout(f"{error.code().name}: {error.details()}") from error
        if len(ends) != 1:
            raise WrongRollout(f"the stream had {len(ends)} events, expected 1")
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
            f"ended with {reason!r} after {turns} turns and {len(messages)} messages; "
            f"expected 'stop' after {order.turns} and {order.facts.messages}"
        )
    last: Mapping[str, Any] = msgspec.json.decode(messages[-1])
    if last.get("content") != order.facts.closing:
        raise WrongRollout(f"the last message is {last.get('content')!r}; expected {order.facts.closing!r}")
