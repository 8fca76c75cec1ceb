"""The server side of `TrainerService.Train`, written from the contract: streams outlive connections; a test drives them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from osmosis.rollout.v1 import completion_service_pb2 as cs
from osmosis.rollout.v1 import rollout_service_pb2 as rs
from osmosis.rollout.v1 import trainer_service_pb2 as pb
from osmosis.rollout.v1.rollout_service_pb2_grpc import (
    RolloutServiceServicer,
    add_RolloutServiceServicer_to_server,
)
from osmosis.rollout.v1.trainer_service_pb2_grpc import TrainerServiceServicer, add_TrainerServiceServicer_to_server

_DETAILS = "grpc-status-details-bin"


class Rejected(Exception):
    """A completion request that the trainer refused."""

    def __init__(self, reject: pb.TrainReject) -> None:
        super().__init__(reject.message)
        self.reject = reject


@dataclass
class Hosted:
    """One stream. `came` holds the trainer's items, each once; `hellos` holds the first item of each connection."""

    id: str
    hellos: list[pb.TrainHello] = field(default_factory=list)
    came: list[pb.TrainRequest] = field(default_factory=list)
    acknowledged: int = 0
    ledgers: asyncio.Queue[pb.TrainLedger] = field(default_factory=asyncio.Queue)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    _kept: list[pb.TrainResponse] = field(default_factory=list)
    _passing: list[pb.TrainResponse] = field(default_factory=list)
    _last: int = 0
    _asks: dict[str, asyncio.Future[cs.CompleteResponse]] = field(default_factory=dict)
    stirred: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def last_seen(self) -> int:
        """Number of the trainer's last accepted item."""
        return max((item.sequence for item in self.came), default=0)

    def send(self, **item: Any) -> int:
        """Send a numbered item, over as many connections as necessary."""
        self._last += 1
        self._kept.append(pb.TrainResponse(sequence=self._last, **item))
        self.stirred.set()
        return self._last

    def mention(self, **item: Any) -> None:
        """Send an item without a number."""
        self._passing.append(pb.TrainResponse(**item))
        self.stirred.set()

    async def Complete(self, request: cs.CompleteRequest) -> cs.CompleteResponse:  # noqa: N802 - an rpc
        """Request a completion and wait for it. Raises `Rejected`."""
        future = self._asks[request.turn_key] = asyncio.get_running_loop().create_future()
        self.send(ask=request)
        return await future

    def take(self, item: pb.TrainRequest) -> bool:
        """Accept an item; return whether it is new."""
        match item.WhichOneof("item"):
            case "acknowledge":
                self.acknowledged = max(self.acknowledged, item.acknowledge.sequence)
                self._kept = [each for each in self._kept if each.sequence > self.acknowledged]
                return False
            case "ledger":
                self.ledgers.put_nowait(item.ledger)
                return False
        if item.sequence <= self.last_seen:
            return False
        assert item.sequence == self.last_seen + 1
        self.came.append(item)
        self.mention(acknowledge=pb.TrainAcknowledge(sequence=item.sequence))
        if item.HasField("answer"):
            self._asks.pop(item.answer.turn_key).set_result(item.answer.response)
        elif item.HasField("reject"):
            self._asks.pop(item.reject.turn_key).set_exception(Rejected(item.reject))
        return True

    def unsent(self, sent: int) -> list[pb.TrainResponse]:
        """Items that a connection has not sent yet."""
        passing, self._passing = self._passing, []
        return [*passing, *(each for each in self._kept if each.sequence > sent)]


Play = Callable[[Hosted, rs.Rollout], Awaitable[None]]


@dataclass
class Host(TrainerServiceServicer, RolloutServiceServicer):
    """Run a test's code for each started rollout. `refusals`: codes of the first starts; `largest`: maximum item size;
    `draining`: no new streams are opened.
    """

    play: Play
    grace: float = 10.0
    refusals: list[grpc.StatusCode] = field(default_factory=list)
    largest: int = 0
    draining: bool = False
    streams: dict[str, Hosted] = field(default_factory=dict)
    cancelled: list[rs.CancelRolloutsRequest] = field(default_factory=list)
    keys: list[Any] = field(default_factory=list)
    _playing: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def stream(self) -> Hosted:
        """The only stream."""
        (stream,) = self.streams.values()
        return stream

    def forget(self) -> None:
        """Forget all streams, as after a restart."""
        self.streams.clear()

    async def Train(self, requests: Any, context: Any) -> AsyncIterator[pb.TrainResponse]:  # noqa: N802 - an rpc
        self.keys.append(dict(context.invocation_metadata()).get("authorization"))
        first = await anext(requests)
        assert first.HasField("hello")
        hello = first.hello
        if self.draining and not hello.stream_id:
            await abort(context, grpc.StatusCode.UNAVAILABLE, "DRAINING", "the server is stopping")
        if hello.stream_id and hello.stream_id not in self.streams:
            await abort(context, grpc.StatusCode.FAILED_PRECONDITION, "STREAM_EXPIRED", "the grace time is over")
        name = hello.stream_id or f"s{len(self.streams)}"
        stream = self.streams.setdefault(name, Hosted(name))
        stream.hellos.append(hello)
        grace = Duration()
        grace.FromMilliseconds(round(1000 * self.grace))
        yield pb.TrainResponse(welcome=pb.TrainWelcome(stream_id=stream.id, last_seen=stream.last_seen, grace=grace))
        ended = asyncio.Event()
        reading = asyncio.create_task(self._read(stream, requests, ended))
        sent = hello.last_seen
        try:
            while True:
                for item in stream.unsent(sent):
                    yield item
                    sent = max(sent, item.sequence)
                if ended.is_set():
                    return
                await stream.stirred.wait()
                stream.stirred.clear()
        finally:
            reading.cancel()

    async def _read(self, stream: Hosted, requests: Any, ended: asyncio.Event) -> None:
        async for item in requests:
            if stream.take(item):
                self._taken(stream, item)
        stream.done.set()
        ended.set()
        stream.stirred.set()

    def _taken(self, stream: Hosted, item: pb.TrainRequest) -> None:
        if item.HasField("cancel"):
            self.cancelled.append(item.cancel)
        if not item.HasField("start"):
            return
        if self.refusals:
            code = self.refusals.pop(0).value[0]
            stream.send(refused=pb.TrainRefusal(start_sequence=item.sequence, code=code, message="no room"))
            return
        count, asked = item.start.count or 1, item.start.rollout.spec
        for index in range(count):
            rollout = rs.Rollout(uid=f"u{item.sequence}-{index}", spec=asked)
            rollout.spec.rollout_id = asked.rollout_id + (f"/{index}" if count > 1 else "")
            stream.send(started=rs.StartRolloutResponse(rollout=rollout))
            task = asyncio.get_running_loop().create_task(self._play(stream, rollout))
            self._playing.add(task)

    async def _play(self, stream: Hosted, rollout: rs.Rollout) -> None:
        await self.play(stream, rollout)

    async def close(self) -> None:
        """End all rollouts. Raises the errors of their code."""
        for task in self._playing:
            task.cancel()
        for ended in await asyncio.gather(*self._playing, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended

    async def GetServerInfo(self, request: Any, context: Any) -> rs.GetServerInfoResponse:  # noqa: N802 - an rpc
        return rs.GetServerInfoResponse(max_request_bytes=self.largest)


async def abort(context: Any, code: grpc.StatusCode, reason: str, text: str) -> None:
    """End a call as the server does."""
    packed = Packed()
    packed.Pack(ErrorInfo(reason=reason, domain="rollout.osmosis"))
    status = Status(code=code.value[0], message=text, details=[packed])
    await context.abort(code, text, ((_DETAILS, status.SerializeToString()),))


@asynccontextmanager
async def hosting(host: Host, *, trains: bool = True) -> AsyncIterator[int]:
    """Serve a host and yield its port, with or without trainer streams."""
    server = grpc.aio.server()
    if trains:
        add_TrainerServiceServicer_to_server(host, server)
    add_RolloutServiceServicer_to_server(host, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)
        await host.close()
