"""Completions that are requested on a trainer's own stream."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from rollout_server.core.outcome import Category, Failure, FailureClass
from rollout_server.core.spec import Spec
from rollout_server.edge.stream.streams import Streams
from rollout_server.edge.tokens.cache import Tokenizers
from rollout_server.edge.tracing.conventions import ATTEMPT_FAILED
from rollout_server.edge.tracing.propagation import add_event
from rollout_server.edge.trainer.grpc_client import (
    LEDGER_SECONDS,
    Rejection,
    TrainerTokens,
    TurnCall,
    rejection_error,
    retry_pause,
)
from rollout_server.edge.trainer.grpc_sampler import CompletionSampler
from rollout_server.edge.trainer.retry import RetryPolicy
from rollout_server.edge.wire.completion import Request, Response
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.runtime.ports import Tool


@dataclass(frozen=True, slots=True)
class StreamTrainers:
    """The shared resources of all samplers of trainers on streams."""

    streams: Streams
    tokenizers: Tokenizers
    retries: RetryPolicy

    def open(self, uid: str, spec: Spec, tools: Sequence[Tool]) -> CompletionSampler:
        """Return the sampler of one rollout."""
        return CompletionSampler(
            StreamCompletionClient(self.streams, uid, self.retries), self.tokenizers, uid, spec, tools
        )


@dataclass(frozen=True, slots=True)
class StreamCompletionClient:
    """Requests completions on the stream that the rollout is on at that time."""

    streams: Streams
    uid: str
    retries: RetryPolicy

    async def complete(self, request: Request, call: TurnCall) -> Response:
        """See `edge.trainer.grpc_client.TrainerClient`."""
        while True:
            call.attempts += 1
            await call.wait_while_paused()
            response = await self._request_completion(request, call)
            if not isinstance(response, Rejection):
                return response
            add_event(ATTEMPT_FAILED, {"rpc.response.status_code": response.code.name})
            pause = retry_pause(response, call, self.retries)
            if pause is None:
                raise rejection_error(response, call)
            await asyncio.sleep(pause)

    async def read_ledger(self, uid: str, segment_id: str, bearer: str) -> TrainerTokens | None:
        """See `edge.trainer.grpc_client.TrainerClient`."""
        stream_rollout = self.streams.stream_rollout(uid)
        return await stream_rollout.read_ledger(segment_id, LEDGER_SECONDS) if stream_rollout is not None else None

    async def _request_completion(self, request: Request, call: TurnCall) -> Response | Rejection:
        stream_rollout = self.streams.stream_rollout(self.uid)
        if stream_rollout is None:
            text = f"turn {call.turn}: the rollout is not on a stream any more, so there is no trainer to complete the turn"
            raise RolloutFailed(Failure(Category.NETWORK, text, call.turn, source=FailureClass.TRAINER))
        return await stream_rollout.complete(request, call)
