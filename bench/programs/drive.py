"""Load driver: starts rollouts over POST /rollout, gRPC and the floor's rpc, and checks the outcome of each."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

import aiohttp
import grpc
import msgspec
from osmosis.rollout.v1 import (
    event_pb2,
    message_pb2,
    outcome_pb2,
    rollout_service_pb2,
    rollout_service_pb2_grpc,
    spec_pb2,
)

from bench.programs.conversation import Facts

if TYPE_CHECKING:
    from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceAsyncStub

TOKENIZER = "bench/tokenizer"
"""Name of the tokenizer in the server's settings."""

FLOOR_METHOD = "/bench.Floor/Run"
_MAX_TOKENS_TOTAL = 1_000_000


class WrongRollout(Exception):
    """A rollout did not end as scripted."""


class Player(Protocol):
    """Runs one rollout per call. Raises `WrongRollout`."""

    def __call__(self) -> Awaitable[None]: ...


@dataclass(frozen=True, slots=True)
class Order:
    """A conversation to run, and the trainer's URL for it.

    Args:
        name: what rollout ids begin with; a gRPC trainer finds the conversation by it.
        trainer: URL of the trainer.
        facts: beginning and end of the conversation.
        agent: name of the agent; empty: the server's default agent.
        started: called with the id of each rollout before it is started.
    """

    name: str
    trainer: str
    facts: Facts
    agent: str = ""
    started: Callable[[str], None] | None = None

    def ids(self) -> Iterator[str]:
        """Yield rollout ids that no other process and no other call yields."""
        prefix = f"{self.name}-{secrets.token_hex(4)}"
        for number in count(1):
            rollout_id = f"{prefix}-{number}"
            if self.started is not None:
                self.started(rollout_id)
            yield rollout_id

    @property
    def turns(self) -> int:
        """Number of completions."""
        return len(self.facts.prompt_tokens)


class _Metrics(msgspec.Struct):
    num_llm_calls: int


class _Outcome(msgspec.Struct):
    rollout_id: str
    status: str
    finish_reason: str
    final_messages: list[msgspec.Raw]
    metrics: _Metrics
    error_message: str | None = None


_OUTCOME = msgspec.json.Decoder(_Outcome)


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
        "metadata": {"agent": order.agent} if order.agent else {},
    }
    rest, ids = msgspec.json.encode(body)[1:], order.ids()

    async def play() -> None:
        content = b'{"rollout_id":"%s",%s' % (next(ids).encode(), rest)
        headers = {"content-type": "application/json"}
        try:
            async with http.post(f"{server}/rollout", data=content, headers=headers) as response:
                text = await response.read()
        except aiohttp.ClientError as error:
            raise WrongRollout(f"no response: {error!r}") from error
        if response.status != 200:
            raise WrongRollout(f"HTTP {response.status}: {text[:500].decode(errors='replace')}")
        check_body(order, text)

    return play


def check_body(order: Order, body: bytes) -> str:
    """Return the rollout id of an outcome of the HTTP APIs. Raises `WrongRollout` unless it ended as scripted."""
    outcome = _OUTCOME.decode(body)
    if outcome.status != "COMPLETED":
        raise WrongRollout(f"{outcome.status}: {outcome.error_message}")
    check_end(order, outcome.finish_reason, outcome.metrics.num_llm_calls, outcome.final_messages)
    return outcome.rollout_id


def grpc_player(channel: grpc.aio.Channel, order: Order, *, in_tokens: bool = True) -> Player:
    """Return a player that runs rollouts over `RunRollout`. The outcome is the only event, as for `POST /rollout`.

    `in_tokens`: use token mode if the trainer's URL is a gRPC one.
    """
    stub: RolloutServiceAsyncStub = rollout_service_pb2_grpc.RolloutServiceStub(channel)
    start, ids = start_request(order, in_tokens=in_tokens), order.ids()

    async def play() -> None:
        start.request_id = start.spec.rollout_id = next(ids)
        request = rollout_service_pb2.RunRolloutRequest(start=start, detail=event_pb2.EVENT_DETAIL_OUTCOME)
        try:
            ends = [item.event.finished.outcome async for item in stub.RunRollout(request) if item.HasField("event")]
        except grpc.aio.AioRpcError as error:
            raise WrongRollout(f"{error.code().name}: {error.details()}") from error
        if len(ends) != 1:
            raise WrongRollout(f"the stream had {len(ends)} events, expected 1")
        check_outcome(order, ends[0])

    return play


def floor_player(channel: grpc.aio.Channel, order: Order) -> Player:
    """Return a player that runs rollouts in the bare gRPC loop."""
    call = channel.unary_unary(
        FLOOR_METHOD,
        request_serializer=rollout_service_pb2.StartRolloutRequest.SerializeToString,
        response_deserializer=outcome_pb2.Outcome.FromString,
    )
    start, ids = start_request(order), order.ids()

    async def play() -> None:
        start.spec.rollout_id = next(ids)
        try:
            outcome = await call(start)
        except grpc.aio.AioRpcError as error:
            raise WrongRollout(f"{error.code().name}: {error.details()}") from error
        check_outcome(order, outcome)

    return play


def start_request(order: Order, *, in_tokens: bool = True) -> rollout_service_pb2.StartRolloutRequest:
    """Return the start of a rollout, without its ids. An order without a URL is for a trainer's stream."""
    texts = [msgspec.json.encode(message).decode() for message in order.facts.opening]
    spec = spec_pb2.RolloutSpec(
        agent=order.agent,
        messages=[message_pb2.Message(json=text) for text in texts],
        tokenizer=spec_pb2.Tokenizer(name=TOKENIZER),
        sampling=spec_pb2.Sampling(temperature=1.0, top_p=1.0, max_tokens=512, logprobs=True),
        limits=spec_pb2.Limits(turns=order.turns, generated_tokens=_MAX_TOKENS_TOTAL),
    )
    if not in_tokens:
        spec.token_mode = spec_pb2.TOKEN_MODE_MESSAGES
    if order.trainer:
        spec.completions.url = order.trainer
    return rollout_service_pb2.StartRolloutRequest(spec=spec)


def check_outcome(order: Order, outcome: outcome_pb2.Outcome) -> None:
    """Raise `WrongRollout` unless a rollout ended as scripted."""
    if outcome.WhichOneof("end") != "stop":
        raise WrongRollout(f"{outcome.WhichOneof('end')}: {outcome.failure.message or outcome.cancellation.reason}")
    messages = [message.json.encode() for message in outcome.messages]
    check_end(order, outcome.stop.reason, outcome.metrics.turns, messages)


def check_end(order: Order, reason: str, turns: int, messages: Sequence[bytes | msgspec.Raw]) -> None:
    """Raise `WrongRollout` unless a rollout ended for this reason, after all turns, with the scripted last message."""
    if (reason, turns, len(messages)) != ("stop", order.turns, order.facts.messages):
        raise WrongRollout(
            f"ended with {reason!r} after {turns} turns and {len(messages)} messages; "
            f"expected 'stop' after {order.turns} and {order.facts.messages}"
        )
    last: Mapping[str, Any] = msgspec.json.decode(messages[-1])
    if last.get("content") != order.facts.closing:
        raise WrongRollout(f"the last message is {last.get('content')!r}; expected {order.facts.closing!r}")
