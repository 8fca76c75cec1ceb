"""A strict trainer that is only a client of `TrainerService.Train` (trainer_service.proto). It uses the same judge as its servers.

It answers requests with `Completions`, resumes a stream after a lost connection, and records in `faults` every violation of the
stream's contract by the server. For a scripted loss of a completion it cuts the connection before the completion is sent.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final, Self

import grpc
from google.rpc import error_details_pb2
from osmosis.rollout.v1 import completion_service_pb2 as completion
from osmosis.rollout.v1 import rollout_service_pb2 as rollouts
from osmosis.rollout.v1 import trainer_service_pb2 as pb
from osmosis.rollout.v1.trainer_service_pb2_grpc import TrainerServiceStub

from rollout_server.testing.checks.stream_rules import TrainRules
from rollout_server.testing.grpc.completions import Completions, SilenceError
from rollout_server.testing.grpc.status import StatusError
from rollout_server.testing.notifier import Notifier

_LARGEST_MESSAGE: Final = 64 * 1024 * 1024
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", _LARGEST_MESSAGE),
    ("grpc.max_send_message_length", _LARGEST_MESSAGE),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # channels to one server otherwise share a TCP connection
    ("grpc.initial_reconnect_backoff_ms", 100),
)
_PAUSE: Final = 0.02
"""Seconds between two connections."""
# Statuses of a lost connection, after which the stream is resumed.
_BROKEN: Final = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED}
)


class RefusedStartError(Exception):
    """The server refused a start. `refusal` is the server's item."""

    def __init__(self, refusal: pb.TrainRefusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class TrainStream:
    """One stream, an async context manager. Entering raises grpc.aio.AioRpcError if the server cannot be reached.

    If the stream ends early, such as after its grace time, all waiting methods raise its error.

    Attributes:
        connections: number of connections so far; more than 1 after a resume.
        asks: the completion requests received, in order; `events`: the events received, in order.
    """

    def __init__(self, completions: Completions, server: str, credit: int, api_key: str) -> None:
        self._completions = completions
        self._server = server
        self._credit = credit
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._rules = TrainRules(credit)
        self._changed = Notifier()
        self._unacknowledged: deque[pb.TrainRequest] = deque()
        self._passing: deque[pb.TrainRequest] = deque()  # items without a sequence number, sent at most once
        self._sent = 0
        self._last = 0
        self._acknowledged = 0
        self._leaving = False
        self._call: Any = None
        self._ended: BaseException | None = None
        self._starts: dict[int, list[str]] = {}
        self._uids: dict[str, str] = {}
        self._refusals: dict[int, pb.TrainRefusal] = {}
        self._outcomes: dict[str, rollouts.Rollout] = {}
        self._asks: set[asyncio.Task[None]] = set()
        self.stream_id = ""
        self.connections = 0
        self.asks: list[completion.CompleteRequest] = []
        self.events: list[pb.TrainEvent] = []

    async def __aenter__(self) -> Self:
        self._channel = grpc.aio.insecure_channel(self._server, _OPTIONS)
        self._carrying = asyncio.create_task(self._carry())
        try:
            await self._until(lambda: self.stream_id)
        except BaseException:
            await self._hang_up()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leaving = True
        self._changed.notify()
        # `_write` half-closes. The server then sends the remaining items and ends the stream.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._carrying), 2)
        await self._hang_up()

    @property
    def faults(self) -> tuple[str, ...]:
        """The server's violations of the stream's contract, in order."""
        return tuple(self._rules.faults)

    @property
    def outcomes(self) -> Mapping[str, rollouts.Rollout]:
        """The rollouts whose outcome was received, by uid."""
        return self._outcomes

    async def start(self, request: rollouts.StartRolloutRequest, count: int = 1) -> tuple[str, ...]:
        """Start a group of rollouts and return their uids in order. Raises RefusedStartError."""
        name = request.spec.rollout_id
        rollout_ids = [f"{name}/{index}" for index in range(count)] if count > 1 else [name]
        self._rules.expect_started(rollout_ids)
        sequence = self._put(pb.TrainRequest(start=pb.TrainStart(rollout=request, count=count)))
        self._starts[sequence] = rollout_ids
        await self._until(lambda: sequence in self._refusals or all(each in self._uids for each in rollout_ids))
        if sequence in self._refusals:
            raise RefusedStartError(self._refusals[sequence])
        return tuple(self._uids[each] for each in rollout_ids)

    async def outcome(self, uid: str) -> rollouts.Rollout:
        """Wait for a rollout's outcome and return the finished rollout."""
        await self._until(lambda: uid in self._outcomes)
        return self._outcomes[uid]

    def cancel(self, uid: str, reason: str = "") -> None:
        """Request cancellation of a rollout."""
        selection = rollouts.Selection(uids=[uid])
        self._put(pb.TrainRequest(cancel=rollouts.CancelRolloutsRequest(selection=selection, reason=reason)))

    def cut(self) -> None:
        """Break the connection. The stream reconnects and resumes."""
        self._call.cancel()

    async def _until(self, holds: Callable[[], object]) -> None:
        await self._changed.until(lambda: bool(holds() or self._ended))
        if not holds() and self._ended:
            raise self._ended

    def _put(self, item: pb.TrainRequest) -> int:
        self._last += 1
        item.sequence = self._last
        self._unacknowledged.append(item)
        self._changed.notify()
        return self._last

    async def _carry(self) -> None:
        """Run one connection after the other until the stream is left or ends with an error."""
        try:
            while not self._leaving:
                self._call = TrainerServiceStub(self._channel).Train(metadata=self._metadata)
                try:
                    await self._use(self._call)
                except grpc.aio.AioRpcError as error:
                    if error.code() not in _BROKEN or not self.stream_id:
                        raise
                except (asyncio.CancelledError, asyncio.InvalidStateError):
                    # `cut` cancels the call, which also raises CancelledError here. Stop only if this task itself is cancelled.
                    task = asyncio.current_task()
                    if task is None or task.cancelling():
                        raise
                await asyncio.sleep(_PAUSE)
        except Exception as error:
            self._ended = error
        finally:
            self._changed.notify()

    async def _use(self, call: Any) -> None:
        hello = pb.TrainHello(stream_id=self.stream_id, last_seen=self._rules.seen, credit=self._credit)
        await call.write(pb.TrainRequest(hello=hello))
        first = await call.read()
        if first is grpc.aio.EOF:
            return
        self._rules.begin(first.welcome, self.stream_id, self._last)
        self._forget(first.welcome.last_seen)
        self._sent = first.welcome.last_seen
        self._acknowledged = 0
        self.stream_id = first.welcome.stream_id
        self.connections += 1
        self._changed.notify()
        writing = asyncio.create_task(self._write(call))
        try:
            while (item := await call.read()) is not grpc.aio.EOF:
                self._take(item)
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def _write(self, call: Any) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                unsent = [item for item in self._unacknowledged if item.sequence > self._sent]
                for item in (*self._passing, *unsent):
                    await call.write(item)
                    self._sent = max(self._sent, item.sequence)
                self._passing.clear()
                if self._acknowledged < self._rules.seen:
                    self._acknowledged = self._rules.seen
                    acknowledge = pb.TrainAcknowledge(sequence=self._acknowledged)
                    await call.write(pb.TrainRequest(acknowledge=acknowledge))
                if self._leaving:
                    await call.done_writing()
                    return
                await self._changed.until(self._is_unsent)

    def _is_unsent(self) -> bool:
        return bool(self._passing) or self._last > self._sent or self._acknowledged < self._rules.seen or self._leaving

    def _take(self, item: pb.TrainResponse) -> None:
        if not self._rules.take(item, self._last):
            return
        match item.WhichOneof("item"):
            case "started":
                self._uids[item.started.rollout.spec.rollout_id] = item.started.rollout.uid
            case "refused":
                self._refusals[item.refused.start_sequence] = item.refused
                self._rules.drop_expected(self._starts.get(item.refused.start_sequence, []))
            case "ask":
                self._start_completion(item.ask)
            case "outcome":
                self._outcomes[item.outcome.rollout.uid] = item.outcome.rollout
            case "event":
                self.events.append(item.event)
            case "acknowledge":
                self._forget(item.acknowledge.sequence)
            case "read_ledger":
                self._send_ledger(item.read_ledger)
        self._changed.notify()

    def _start_completion(self, request: completion.CompleteRequest) -> None:
        self.asks.append(request)
        self._completions.record_request(request, {})
        task = asyncio.create_task(self._complete(request))
        self._asks.add(task)
        task.add_done_callback(self._asks.discard)

    async def _complete(self, request: completion.CompleteRequest) -> None:
        key = request.turn_key
        try:
            response = await self._completions.complete(request)
        except SilenceError:
            return
        except StatusError as error:
            self._rules.end_request(key)
            self._put(pb.TrainRequest(reject=_reject(key, error)))
            return
        if fault := self._completions.pop_lost(key):
            await asyncio.sleep(fault.delay)
            self.cut()
        self._rules.end_request(key)
        self._put(pb.TrainRequest(answer=pb.TrainAnswer(turn_key=key, response=response)))
        if second := self._completions.pop_second_response(key):
            self._put(pb.TrainRequest(answer=pb.TrainAnswer(turn_key=key, response=second)))

    def _send_ledger(self, request: completion.ReadLedgerRequest) -> None:
        ledger = pb.TrainLedger(uid=request.uid, segment_id=request.segment_id)
        with contextlib.suppress(StatusError):
            ledger.ledger.CopyFrom(self._completions.ledger(request))
        self._passing.append(pb.TrainRequest(ledger=ledger))

    def _forget(self, sequence: int) -> None:
        while self._unacknowledged and self._unacknowledged[0].sequence <= sequence:
            self._unacknowledged.popleft()

    async def _hang_up(self) -> None:
        for task in (*self._asks, self._carrying):
            task.cancel()
        await asyncio.gather(*self._asks, self._carrying, return_exceptions=True)
        await self._channel.close()


def _reject(turn_key: str, error: StatusError) -> pb.TrainReject:
    number, _ = error.code.value
    reject = pb.TrainReject(turn_key=turn_key, code=number, message=error.text)
    for detail in error.details:
        if isinstance(detail, error_details_pb2.ErrorInfo):
            reject.reason = detail.reason
        elif isinstance(detail, error_details_pb2.RetryInfo):
            reject.retry_after.CopyFrom(detail.retry_delay)
        elif isinstance(detail, completion.LedgerMismatch):
            reject.mismatch.CopyFrom(detail)
    return reject
