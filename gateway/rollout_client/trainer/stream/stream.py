"""What runs over one stream: starts and their answers, asks and theirs, outcomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
from rollout_client.trainer.outcomes import Outcomes
from rollout_client.trainer.rollout_records import Records
from rollout_client.trainer.stream.connection import Connection
from rollout_client.trainer.stream.outbox import StreamOutbox
from rollout_client.trainer.stream.pending_requests import PendingRequests
from rollout_client.trainer.stream.starts import Starts
from rollout_client.trainer.transport import LEFT
from rollout_client.trainer.turns import Turns


@dataclass(frozen=True, slots=True)
class Side:
    """What a trainer brings along, whichever stream it uses. At most `credit` asks are to be under way at once."""

    turns: Turns
    records: Records
    outcomes: Outcomes
    credit: int


class Stream:
    """One stream, from its first connection to its end.

    Args:
        channel: of a client.
        side: the trainer's.
        largest: bytes that the server takes in one item; 0: not known.
    """

    def __init__(self, channel: AsyncChannel, side: Side, largest: int) -> None:
        self._side = side
        self._outbox = StreamOutbox(largest)
        self._starts = Starts()
        self._asks = PendingRequests(side.turns, self._outbox)
        self._running: dict[str, str] = {}
        self.connection = Connection(channel, side.credit, self._outbox, self._receive)

    @property
    def running(self) -> Mapping[str, str]:
        """The rollouts without an outcome, by their uids: their names."""
        return self._running

    async def start(self, request: StartRolloutRequest, rollout_ids: Sequence[str]) -> Mapping[str, str]:
        """Starts a group, and returns its uids by their names. Raises RolloutError."""
        item = TrainRequest(start=TrainStart(rollout=request, count=len(rollout_ids)))
        return await self._starts.expect(self._outbox.put(item), rollout_ids)

    def cancel(self, rollout_id: str) -> None:
        """Ends a rollout, if it runs."""
        cancel = CancelRolloutsRequest(selection=Selection(rollout_ids=[rollout_id]), reason=LEFT)
        self._outbox.put(TrainRequest(cancel=cancel))

    async def fail(self, failure: RolloutError) -> None:
        """Nothing is carried any more: nobody waits for answers, and no start is answered."""
        self._starts.fail(failure)
        await self._asks.close()

    async def close(self) -> None:
        """Hangs up and gives up what is under way."""
        await self.connection.close()
        await self._asks.close()

    def _receive(self, item: TrainResponse) -> None:
        """Takes an item in. Kinds that are not known here are passed over."""
        match item.WhichOneof("item"):
            case "started":
                rollout = item.started.rollout
                self._running[rollout.uid] = rollout.spec.rollout_id
                self._starts.started(item.started)
            case "refused":
                self._starts.refused(item.refused)
            case "ask":
                self._asks.take(item.ask)
            case "outcome":
                self._ended(item.outcome)
            case "read_ledger":
                self._tell(item.read_ledger)

    def _ended(self, delivered: DeliveredOutcome) -> None:
        rollout = delivered.rollout
        self._running.pop(rollout.uid, None)
        self._asks.drop(rollout.uid)
        self._side.outcomes.settle(rollout)

    def _tell(self, request: ReadLedgerRequest) -> None:
        told = TrainLedger(uid=request.uid, segment_id=request.segment_id)
        ledger = self._side.records.ledger(request)
        if ledger is not None and (not self._outbox.largest or ledger.ByteSize() < self._outbox.largest):
            told.ledger.CopyFrom(ledger)
        self._outbox.mention(TrainRequest(ledger=told))
