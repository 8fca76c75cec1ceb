"""Pending items of a stream: starts that wait for the server, and completion requests that wait for the trainer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import grpc
from google.rpc.error_details_pb2 import RetryInfo
from osmosis.rollout.v1.completion_service_pb2 import CompleteRequest, LedgerMismatch
from osmosis.rollout.v1.rollout_service_pb2 import StartRolloutRequest, StartRolloutResponse
from osmosis.rollout.v1.trainer_service_pb2 import TrainAnswer, TrainRefusal, TrainReject, TrainRequest

from rollout_client.errors import RolloutError, TooLarge, refusal_error
from rollout_client.trainer.errors import RefusedCall
from rollout_client.trainer.stream.buffers import StreamOutbox
from rollout_client.trainer.turns import Turns

_LOG: Final = logging.getLogger("rollout_client")


@dataclass(slots=True, eq=False)
class GroupStart:
    """The start of a group.

    Args:
        request: the request that the server derives those of the rollouts from.
        rollout_ids: ids of the rollouts.
        accepted: the uids by rollout id; raises RolloutError if the start is refused.
        uids: those of the rollouts that the server has accepted so far.
    """

    request: StartRolloutRequest
    rollout_ids: Sequence[str]
    accepted: asyncio.Future[Mapping[str, str]]
    uids: dict[str, str] = field(default_factory=dict)

    @property
    def is_accepted(self) -> bool:
        """Whether the server has accepted all rollouts."""
        return len(self.uids) == len(self.rollout_ids)


class PendingStarts:
    """Starts without a response, by the sequence number of their item.

    The server accepts all rollouts of a group or refuses the start.
    """

    def __init__(self) -> None:
        self._starts: dict[int, GroupStart] = {}
        self._by_rollout: dict[str, GroupStart] = {}

    def expect(
        self, sequence: int, request: StartRolloutRequest, rollout_ids: Sequence[str]
    ) -> asyncio.Future[Mapping[str, str]]:
        """Return a future of the uids by rollout id. It raises RolloutError if the start is refused."""
        start = GroupStart(request, rollout_ids, asyncio.get_running_loop().create_future())
        self._starts[sequence] = start
        self._by_rollout |= dict.fromkeys(rollout_ids, start)
        start.accepted.add_done_callback(lambda _: self._forget(sequence, rollout_ids))
        return start.accepted

    def accept(self, response: StartRolloutResponse) -> GroupStart | None:
        """Handle `started`: the server accepted one rollout. Returns its start; None if nobody waits for that any more."""
        rollout_id = response.rollout.spec.rollout_id
        start = self._by_rollout.get(rollout_id)
        if start is not None:
            start.uids[rollout_id] = response.rollout.uid
            if start.is_accepted and not start.accepted.done():
                start.accepted.set_result(start.uids)
        return start

    def refuse(self, refusal: TrainRefusal) -> bool:
        """Handle `refused`. Returns False if it is no start that was refused."""
        start = self._starts.get(refusal.start_sequence)
        if start is not None and not start.accepted.done():
            start.accepted.set_exception(refusal_error(refusal.code, refusal.message, "REFUSED"))
        return start is not None

    def fail(self, failure: RolloutError) -> None:
        """Fail all pending starts: the stream has ended."""
        for start in tuple(self._starts.values()):
            if not start.accepted.done():
                start.accepted.set_exception(failure)

    def _forget(self, sequence: int, rollout_ids: Sequence[str]) -> None:
        self._starts.pop(sequence, None)
        for rollout_id in rollout_ids:
            self._by_rollout.pop(rollout_id, None)


class PendingCompletions:
    """Completion requests in progress, by rollout and turn key. Each one is completed or rejected once, in any order.

    They continue while the stream is disconnected, and when it is replaced by another one.

    Args:
        turns: generates the completions.

    Attributes:
        outbox: that of the current stream. The responses wait there.
    """

    def __init__(self, turns: Turns) -> None:
        self.outbox = StreamOutbox()
        self._turns = turns
        self._tasks: dict[str, dict[str, asyncio.Task[None]]] = {}

    def __len__(self) -> int:
        """Number of requests in progress, without those that are being cancelled."""
        return sum(not task.cancelling() for tasks in self._tasks.values() for task in tasks.values())

    def start(self, request: CompleteRequest) -> None:
        """Start the completion of a request, unless it is in progress: another stream may request it again."""
        tasks, key = self._tasks.setdefault(request.uid, {}), request.turn_key
        running = tasks.get(key)
        if running is not None and not (running.done() or running.cancelling()):
            return
        task = tasks[key] = asyncio.create_task(self._complete(request))
        task.add_done_callback(lambda task: self._forget_task(request.uid, key, task))

    def cancel(self, uid: str) -> None:
        """Cancel the generations of a rollout that has ended."""
        for task in self._tasks.get(uid, {}).values():
            task.cancel()

    async def close(self) -> None:
        """Cancel all generations."""
        tasks = [task for tasks in self._tasks.values() for task in tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget_task(self, uid: str, key: str, task: asyncio.Task[None]) -> None:
        tasks = self._tasks.get(uid, {})
        if tasks.get(key) is task:
            del tasks[key]
        if not tasks:
            self._tasks.pop(uid, None)

    async def _complete(self, request: CompleteRequest) -> None:
        key = request.turn_key
        try:
            answer = TrainAnswer(turn_key=key, response=await self._turns.complete(request))
            self.outbox.put(TrainRequest(answer=answer))
            return
        except RefusedCall as error:
            refused = error
        except TooLarge as error:
            refused = RefusedCall(grpc.StatusCode.INTERNAL, "ANSWER_TOO_LARGE", error.message)
        except Exception:
            _LOG.exception("turn %s failed", key)
            refused = RefusedCall(grpc.StatusCode.INTERNAL, "INTERNAL", "internal error of the trainer; see its log")
        self.outbox.put(TrainRequest(reject=_reject(key, refused)))


def _reject(turn_key: str, refused: RefusedCall) -> TrainReject:
    code, _ = refused.code.value
    reject = TrainReject(turn_key=turn_key, code=code, message=refused.text, reason=refused.reason)
    for detail in refused.details:
        if isinstance(detail, RetryInfo):
            reject.retry_after.CopyFrom(detail.retry_delay)
        elif isinstance(detail, LedgerMismatch):
            reject.mismatch.CopyFrom(detail)
    return reject
