"""Rollouts that the bench trainer itself starts, as trainers do: the asynchronous HTTP API and `TrainerService.Train`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import aiohttp
import grpc
import msgspec
from osmosis.rollout.v1 import completion_service_pb2
from osmosis.rollout.v1 import trainer_service_pb2 as pb
from osmosis.rollout.v1.trainer_service_pb2_grpc import TrainerServiceStub

from bench.programs.completions import Completions, WrongRequest
from bench.programs.drive import Order, Player, WrongRollout, check_body, check_outcome, play_many, start_request

_JSON = {"content-type": "application/json"}
_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.enable_http_proxy", 0)]


class Batch(msgspec.Struct, frozen=True):
    """Rollouts that the trainer is to start.

    Args:
        api: "sync", "init", "tokens" or "stream".
        server: URL of the HTTP API, or address of the gRPC one.
        conversation: its name.
        rollouts: their number; `concurrency`: how many at once.
        spread: seconds over which the first ones are started.
        agent: name of the agent; empty: the server's default agent.
        timed: whether the time from a start to the first request of its rollout counts as a gap.
    """

    api: str
    server: str
    conversation: str
    rollouts: int
    concurrency: int
    spread: float = 0.0
    agent: str = ""
    timed: bool = False


class Ends(msgspec.Struct):
    """How many rollouts of a batch did not end as scripted, and how the first of them ended."""

    failed: int = 0
    first: str = ""


async def run_batch(play: Player, batch: Batch) -> Ends:
    """Run the rollouts of a batch to their ends."""
    ends, numbers = Ends(), count()

    async def play_counted() -> None:
        number = next(numbers)
        if number < batch.concurrency:
            await asyncio.sleep(batch.spread * number / batch.concurrency)
        try:
            await play()
        except WrongRollout as wrong:
            ends.failed += 1
            ends.first = ends.first or str(wrong)

    await play_many(play_counted, batch.rollouts, batch.concurrency)
    return ends


class Callbacks:
    """The outcomes that rollouts of the asynchronous HTTP API have yet to deliver."""

    def __init__(self) -> None:
        self._expected: dict[str, tuple[Order, asyncio.Future[None]]] = {}

    def expect(self, rollout_id: str, order: Order) -> asyncio.Future[None]:
        """Return a future that ends with the outcome of a rollout. It raises `WrongRollout`."""
        future = asyncio.get_running_loop().create_future()
        self._expected[rollout_id] = order, future
        return future

    def deliver(self, body: bytes) -> None:
        """Receive an outcome. One that is delivered again is ignored."""
        rollout_id = msgspec.json.decode(body)["rollout_id"]
        order, future = self._expected.pop(rollout_id, (None, None))
        if order is None or future is None:
            return
        try:
            check_body(order, body)
        except WrongRollout as wrong:
            future.set_exception(wrong)
        else:
            future.set_result(None)


def init_player(http: aiohttp.ClientSession, server: str, order: Order, callbacks: Callbacks) -> Player:
    """Return a player that runs rollouts over `POST /v1/rollout/init`, until their outcomes are delivered."""
    body = {
        "server_url": order.trainer,
        "messages": order.facts.opening,
        "completion_params": {"temperature": 1.0, "top_p": 1.0, "max_tokens": 512, "logprobs": True},
        "max_turns": order.turns,
        "max_tokens_total": 1_000_000,
        "metadata": {"agent": order.agent} if order.agent else {},
    }
    rest, ids = msgspec.json.encode(body)[1:], order.ids()

    async def play() -> None:
        rollout_id = next(ids)
        ended = callbacks.expect(rollout_id, order)
        content = b'{"rollout_id":"%s",%s' % (rollout_id.encode(), rest)
        async with http.post(f"{server}/v1/rollout/init", data=content, headers=_JSON) as response:
            if response.status != 202:
                raise WrongRollout(f"HTTP {response.status}: {(await response.text())[:500]}")
        await ended

    return play


_TOGETHER = 16
"""How many items are acknowledged together, as by `rollout_client`."""


class Stream:
    """A stream of `TrainerService.Train` that starts rollouts of one conversation and answers their requests."""

    def __init__(self, order: Order, completions: Completions, credit: int) -> None:
        self._order = order
        self._completions = completions
        self._credit = credit
        self._outgoing: deque[pb.TrainRequest] = deque()
        self._changed = asyncio.Event()
        self._sequence = 0
        self._seen = 0
        self._over = False
        self._ends: dict[str, asyncio.Future[None]] = {}
        self._answering: set[asyncio.Task[None]] = set()

    async def run(self, batch: Batch) -> Ends:
        """Run the rollouts of a batch, and return when their outcomes have arrived."""
        start, ids = start_request(self._order), self._order.ids()

        async def play() -> None:
            start.request_id = start.spec.rollout_id = rollout_id = next(ids)
            ended = self._ends[rollout_id] = asyncio.get_running_loop().create_future()
            self._put(pb.TrainRequest(start=pb.TrainStart(rollout=start)))
            await ended

        async with grpc.aio.insecure_channel(batch.server, _OPTIONS) as channel:
            reading = asyncio.create_task(self._read(TrainerServiceStub(channel).Train(self._written())))
            ends = await run_batch(play, batch)
            self._over = True
            self._changed.set()
            await reading
        return ends

    def _put(self, item: pb.TrainRequest) -> None:
        self._sequence += 1
        item.sequence = self._sequence
        self._outgoing.append(item)
        self._changed.set()

    async def _written(self) -> AsyncIterator[pb.TrainRequest]:
        yield pb.TrainRequest(hello=pb.TrainHello(credit=self._credit))
        acknowledged = 0
        while not self._over:
            await self._changed.wait()
            self._changed.clear()
            while self._outgoing:
                yield self._outgoing.popleft()
            if self._seen - acknowledged >= _TOGETHER or self._over:
                acknowledged = self._seen
                yield pb.TrainRequest(acknowledge=pb.TrainAcknowledge(sequence=acknowledged))

    async def _read(self, call: Any) -> None:
        try:
            async for item in call:
                self._take(item)
        except (grpc.aio.AioRpcError, WrongRollout) as error:
            for ended in self._ends.values():
                if not ended.done():
                    ended.set_exception(WrongRollout(str(error)))

    def _take(self, item: pb.TrainResponse) -> None:
        kind = item.WhichOneof("item")
        if kind == "ask":
            task = asyncio.create_task(self._answer(item.ask))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        elif kind == "outcome":
            rollout = item.outcome.rollout
            ended = self._ends.pop(rollout.spec.rollout_id)
            try:
                check_outcome(self._order, rollout.outcome)
            except WrongRollout as wrong:
                ended.set_exception(wrong)
            else:
                ended.set_result(None)
        elif kind == "refused":
            raise WrongRollout(f"a start was refused: {item.refused.message}")
        if item.sequence:
            self._seen = item.sequence
            self._changed.set()

    async def _answer(self, request: completion_service_pb2.CompleteRequest) -> None:
        try:
            response = await self._completions.answer(request, request.ByteSize())
        except WrongRequest as wrong:
            code, _ = grpc.StatusCode.INVALID_ARGUMENT.value
            self._put(pb.TrainRequest(reject=pb.TrainReject(turn_key=request.turn_key, code=code, message=str(wrong))))
            return
        self._put(pb.TrainRequest(answer=pb.TrainAnswer(turn_key=request.turn_key, response=response)))
