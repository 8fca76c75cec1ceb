"""Messages of one stream: starts, completion requests, outcomes, cancellations and ledger requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from osmosis.rollout.v1.completion_service_pb2 import ReadLedgerRequest
from osmosis.rollout.v1.rollout_service_pb2 import CancelRolloutsRequest, Selection, StartRolloutRequest
from osmosis.rollout.v1.trainer_service_pb2 import (
    DeliveredOutcome,
    TrainLedger,
    TrainRequest,
    TrainResponse,
    TrainStart,
)

from rollout_client.channels import AsyncChannel
from rollout_client.errors import RolloutError
from rollout_client.trainer.batches import Batches
from rollout_client.trainer.policy import AnnouncedPolicy
from rollout_client.trainer.rollout_records import Outcomes, Records
from rollout_client.trainer.stream.buffers import StreamOutbox
from rollout_client.trainer.stream.connection import StreamConnection
from rollout_client.trainer.stream.pending import GroupStart, PendingCompletions, PendingStarts
from rollout_client.trainer.transport import CANCEL_REASON
from rollout_client.trainer.turns import Turns

_LOG: Final = logging.getLogger("rollout_client")


@dataclass(frozen=True, slots=True)
class TrainerSide:
    """The trainer's state, shared by all its streams.

    Args:
        credit: maximum number of completion requests in progress.
        announced: the policy that a new stream begins with.
        batches: collects the turns if the trainer generates in batches.
    """

    turns: Turns
    records: Records
    outcomes: Outcomes
    credit: int
    announced: AnnouncedPolicy
    batches: Batches | None = None


class StreamSession:
    """One stream, from its first connection to its end.

    Args:
        channel: channel of a client.
        side: the trainer's state.
        completions: the completion requests in progress. The responses go to this stream from now on.
        largest: maximum size of one item in bytes that the server accepts; 0: unknown.
    """

    def __init__(self, channel: AsyncChannel, side: TrainerSide, completions: PendingCompletions, largest: int) -> None:
        self._side = side
        self._outbox = completions.outbox = StreamOutbox(largest)
        self._starts = PendingStarts()
        self._completions = completions
        self._running: dict[str, GroupStart] = {}
        self._cancelled: dict[str, bool] = {}  # by the ids of the rollouts that run
        if not side.announced.is_initial:  # the server knows the announcements of this stream only
            self._outbox.put(TrainRequest(policy=side.announced.to_proto()))
        idle = side.batches is not None
        self.connection = StreamConnection(channel, side.credit, self._outbox, self._receive, idle=idle)

    @property
    def running(self) -> Collection[GroupStart]:
        """The accepted starts with a rollout that has no outcome."""
        return [start for start in dict.fromkeys(self._running.values()) if start.is_accepted]

    @property
    def cancelled(self) -> Sequence[str]:
        """Ids of cancelled rollouts without an outcome. A crash of the server may lose a cancellation that it acknowledged."""
        items = self._outbox.unacknowledged()
        sent = [each for item in items if item.HasField("cancel") for each in item.cancel.selection.rollout_ids]
        return list(dict.fromkeys([*sent, *(each for each, cancelled in self._cancelled.items() if cancelled)]))

    async def start(self, request: StartRolloutRequest, rollout_ids: Sequence[str]) -> Mapping[str, str]:
        """Start a group and return the uids by rollout id. Raises RolloutError."""
        item = TrainRequest(start=TrainStart(rollout=request, count=len(rollout_ids)))
        return await self._starts.expect(self._outbox.put(item), request, rollout_ids)

    def cancel(self, rollout_ids: Sequence[str]) -> None:
        """Queue the cancellation of rollouts."""
        cancel = CancelRolloutsRequest(selection=Selection(rollout_ids=rollout_ids), reason=CANCEL_REASON)
        self._outbox.put(TrainRequest(cancel=cancel))
        self._cancelled.update((each, True) for each in rollout_ids if each in self._cancelled)

    async def announce(self) -> None:
        """Announce the trainer's policy as it is now, and wait until the server has processed it or the stream has ended."""
        processed = self._outbox.processed(self._outbox.put(TrainRequest(policy=self._side.announced.to_proto())))
        await asyncio.wait((processed, self.connection.over), return_when=asyncio.FIRST_COMPLETED)

    def fail(self, failure: RolloutError) -> None:
        """Fail pending starts after the stream has ended."""
        self._starts.fail(failure)

    def _receive(self, item: TrainResponse) -> None:
        """Handle a received item. Unknown kinds are ignored, because newer servers may add some."""
        if item.sequence and self._side.batches is not None:
            self._side.batches.expect(None)
        match item.WhichOneof("item"):
            case "started":
                start = self._starts.accept(item.started)
                if start is not None:
                    self._running[item.started.rollout.uid] = start
                    self._cancelled[item.started.rollout.spec.rollout_id] = False
            case "refused":
                if not self._starts.refuse(item.refused):
                    _LOG.error("the server refused a cancellation or an announcement: %s", item.refused.message)
            case "ask":
                self._completions.start(item.ask)
            case "outcome":
                self._settle(item.outcome)
            case "read_ledger":
                self._send_ledger(item.read_ledger)
            case "idle":
                # Out of date if the server does not know of all items of this trainer. Then it sends another one.
                if self._side.batches is not None and not self._outbox:
                    self._side.batches.expect(len(self._completions))

    def _settle(self, delivered: DeliveredOutcome) -> None:
        rollout = delivered.rollout
        self._running.pop(rollout.uid, None)
        self._cancelled.pop(rollout.spec.rollout_id, None)
        self._completions.cancel(rollout.uid)
        self._side.outcomes.settle(rollout)

    def _send_ledger(self, request: ReadLedgerRequest) -> None:
        response = TrainLedger(uid=request.uid, segment_id=request.segment_id)
        ledger = self._side.records.ledger(request)
        if ledger is not None and (not self._outbox.largest or ledger.ByteSize() < self._outbox.largest):
            response.ledger.CopyFrom(ledger)
        self._outbox.put_unnumbered(TrainRequest(ledger=response))
