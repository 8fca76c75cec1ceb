"""Completion requests that came over a stream: each is answered or refused once, in any order."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import grpc
from google.rpc.error_details_pb2 import RetryInfo
from osmosis.rollout.v1.completion_service_pb2 import CompleteRequest, LedgerMismatch
from osmosis.rollout.v1.trainer_service_pb2 import TrainAnswer, TrainReject, TrainRequest

from rollout_client.errors import TooLarge
from rollout_client.trainer.refusal import RefusedCall
from rollout_client.trainer.stream.outbox import StreamOutbox
from rollout_client.trainer.turns import Turns

_LOG: Final = logging.getLogger("rollout_client")


class PendingRequests:
    """Asks that are under way, by rollout. They outlive a cut of the stream, as their generations do.

    Args:
        turns: who answers.
        outbox: where answers go.
    """

    def __init__(self, turns: Turns, outbox: StreamOutbox) -> None:
        self._turns = turns
        self._outbox = outbox
        self._going: dict[str, set[asyncio.Task[None]]] = {}

    def take(self, request: CompleteRequest) -> None:
        """Has an ask answered."""
        going = self._going.setdefault(request.uid, set())
        task = asyncio.create_task(self._answer(request))
        going.add(task)
        task.add_done_callback(lambda task: self._ended(request.uid, task))

    def drop(self, uid: str) -> None:
        """Nobody waits for a rollout's turns any more: their generations are cancelled."""
        for task in tuple(self._going.get(uid, ())):
            task.cancel()

    async def close(self) -> None:
        """Gives up all of them."""
        tasks = [task for going in self._going.values() for task in going]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, uid: str, task: asyncio.Task[None]) -> None:
        going = self._going[uid]
        going.discard(task)
        if not going:
            del self._going[uid]

    async def _answer(self, request: CompleteRequest) -> None:
        key = request.turn_key
        try:
            answer = TrainAnswer(turn_key=key, response=await self._turns.answer(request))
            self._outbox.put(TrainRequest(answer=answer))
            return
        except RefusedCall as error:
            refused = error
        except TooLarge as error:
            refused = RefusedCall(grpc.StatusCode.INTERNAL, "ANSWER_TOO_LARGE", error.message)
        except Exception:
            _LOG.exception("turn %s could not be answered", key)
            refused = RefusedCall(grpc.StatusCode.INTERNAL, "INTERNAL", "a fault of the trainer's, whose log has it")
        self._outbox.put(TrainRequest(reject=_reject(key, refused)))


def _reject(turn_key: str, refused: RefusedCall) -> TrainReject:
    code, _ = refused.code.value
    reject = TrainReject(turn_key=turn_key, code=code, message=refused.text, reason=refused.reason)
    for detail in refused.details:
        if isinstance(detail, RetryInfo):
            reject.retry_after.CopyFrom(detail.retry_delay)
        elif isinstance(detail, LedgerMismatch):
            reject.mismatch.CopyFrom(detail)
    return reject
