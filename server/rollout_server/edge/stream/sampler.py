"""Completions that are asked for on a trainer's own stream."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from rollout_server.core.outcome import Category, Failure
from rollout_server.core.spec import Spec
from rollout_server.edge.stream.streams import Streams
from rollout_server.edge.tokens.cache import Tokenizers
from rollout_server.edge.trainer.grpc_client import LEDGER_SECONDS, Held, Rejection, TurnCall, ended, put_off
from rollout_server.edge.trainer.grpc_sampler import CompletionSampler
from rollout_server.edge.trainer.retry import RetryPolicy
from rollout_server.edge.wire.completion import Request, Response
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.runtime.ports import Tool


@dataclass(frozen=True, slots=True)
class StreamTrainers:
    """What all samplers of trainers on streams share."""

    streams: Streams
    tokenizers: Tokenizers
    retries: RetryPolicy

    def open(self, uid: str, spec: Spec, tools: Sequence[Tool]) -> CompletionSampler:
        """The sampler of one rollout."""
        return CompletionSampler(
            StreamCompletionClient(self.streams, uid, self.retries), self.tokenizers, uid, spec, tools
        )


@dataclass(frozen=True, slots=True)
class StreamCompletionClient:
    """Asks the trainer on whose stream a rollout is, whichever that is at the time."""

    streams: Streams
    uid: str
    retries: RetryPolicy

    async def complete(self, request: Request, call: TurnCall) -> Response:
        """As `edge.trainer.grpc_client.TrainerClient`."""
        while True:
            call.attempts += 1
            said = await self._ask(request, call)
            if not isinstance(said, Rejection):
                return said
            pause = put_off(said, call, self.retries)
            if pause is None:
                raise ended(said, call)
            await asyncio.sleep(pause)

    async def read_ledger(self, uid: str, segment_id: str, bearer: str) -> Held | None:
        """As `edge.trainer.grpc_client.TrainerClient`."""
        seat = self.streams.seat(uid)
        return await seat.read(segment_id, LEDGER_SECONDS) if seat is not None else None

    async def _ask(self, request: Request, call: TurnCall) -> Response | Rejection:
        seat = self.streams.seat(self.uid)
        if seat is None:
            text = f"turn {call.turn}: the rollout is on no stream any more, so nobody completes"
            raise RolloutFailed(Failure(Category.NETWORK, text, call.turn))
        return await seat.ask(request, call)
