"""A trainer on the raw stub of TrainerService: it numbers and stores its items, and keeps ledgers as specified in token.proto."""

from __future__ import annotations

import asyncio
import hashlib
import json
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
from osmosis.rollout.v1 import completion_service_pb2 as cpb
from osmosis.rollout.v1 import event_pb2, message_pb2, spec_pb2, token_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as rpb
from osmosis.rollout.v1 import trainer_service_pb2 as pb
from osmosis.rollout.v1.trainer_service_pb2_grpc import TrainerServiceStub

SECONDS = 20.0
Answer: TypeAlias = Callable[[cpb.CompleteRequest], cpb.CompleteResponse]


class Cut(Exception):
    """The connection is cut here."""


@dataclass
class Book:
    """One rollout of a trainer in token mode. `answer` holds the ids of every completion."""

    answer: Sequence[int]
    spans: list[token_pb2.Span] = field(default_factory=list)

    def complete(self, request: cpb.CompleteRequest) -> cpb.CompleteResponse:
        """Return a completion."""
        if not request.HasField("base"):
            self.spans.clear()
        self.spans += request.new_tokens.spans
        response = cpb.CompleteResponse(
            message=message_pb2.Message(json=json.dumps({"role": "assistant", "content": f"Turn {request.turn}."})),
            finish_reason="stop",
            token_ids=self.answer,
            logprobs=token_pb2.Logprobs(values=[-0.5] * len(self.answer)),
            policy_version="v1",
            prompt_checkpoint=self.checkpoint(),
        )
        self.spans.append(token_pb2.Span(author=token_pb2.AUTHOR_MODEL, turn=request.turn, token_ids=self.answer))
        response.after.CopyFrom(self.checkpoint())
        return response

    def checkpoint(self) -> token_pb2.Checkpoint:
        """The checkpoint of the current tokens."""
        words = [t | (span.author == token_pb2.AUTHOR_MODEL) << 31 for span in self.spans for t in span.token_ids]
        digest = hashlib.sha256(struct.pack(f"<{len(words)}I", *words)).digest()
        return token_pb2.Checkpoint(tokens=len(words), digest=digest)

    def ids(self) -> list[int]:
        """All token ids."""
        return [token for span in self.spans for token in span.token_ids]


class Line:
    """One connection."""

    def __init__(self, channel: grpc.aio.Channel, key: str = "") -> None:
        metadata = (("authorization", f"Bearer {key}"),) if key else ()
        self.call: Any = TrainerServiceStub(channel).Train(metadata=metadata)

    async def send(self, **item: Any) -> None:
        """Send one item."""
        await self.write(pb.TrainRequest(**item))

    async def write(self, item: pb.TrainRequest) -> None:
        """Send an item. Raises AioRpcError if the connection has ended, also if that was known before."""
        try:
            await self.call.write(item)
        except asyncio.InvalidStateError:
            raise await self.refused() from None

    async def read(self) -> pb.TrainResponse | None:
        """The next item; None if the server ended the stream with OK. Raises AioRpcError."""
        item = await asyncio.wait_for(self.call.read(), SECONDS)
        return None if item is grpc.aio.EOF else item

    async def welcome(self, **hello: Any) -> pb.TrainWelcome:
        """Send the hello item and return the welcome."""
        await self.send(hello=pb.TrainHello(**({"credit": 16} | hello)))
        item = await self.read()
        assert item is not None
        assert item.WhichOneof("item") == "welcome"
        return item.welcome

    async def refused(self) -> grpc.aio.AioRpcError:
        """The status with which the connection ends."""
        try:
            while await self.read() is not None:
                pass
        except grpc.aio.AioRpcError as error:
            return error
        raise AssertionError("the stream ended with OK")


def start(rollout_id: str, count: int = 0, request_id: str = "", **spec: Any) -> pb.TrainStart:
    """Start a group."""
    fields: dict[str, Any] = {
        "messages": [message_pb2.Message(json='{"role": "user", "content": "Go."}')],
        "tokenizer": spec_pb2.Tokenizer(name="t"),
    }
    wanted = spec_pb2.RolloutSpec(rollout_id=rollout_id, **(fields | spec))
    return pb.TrainStart(rollout=rpb.StartRolloutRequest(spec=wanted, request_id=request_id), count=count)


class Trainer:
    """A trainer that receives each item of the server once, over as many connections as necessary.

    Args:
        answer: ids of each completion.
        cut_after: break the connection at this item on the wire, counted over all connections; 0: never.
        loses: the item at which it breaks is not delivered; only for received items.
        automatic: return completions and acknowledge without a call from the test.
    """

    def __init__(self, channel: grpc.aio.Channel, answer: Sequence[int], **hello: Any) -> None:
        self.channel = channel
        self.hello = hello
        self.answer = answer
        self.key = ""
        self.cut_after = 0
        self.loses = False
        self.automatic = True
        self.stream_id = ""
        self.seen = self.sent = self.on_wire = self.connections = 0
        self.kept: list[pb.TrainRequest] = []
        self.items: list[pb.TrainResponse] = []
        self.asks: list[cpb.CompleteRequest] = []
        self.outcomes: list[rpb.Rollout] = []
        self.refused: list[pb.TrainRefusal] = []
        self.started: list[rpb.Rollout] = []
        self.events: list[pb.TrainEvent] = []
        self.generated: Counter[str] = Counter()
        self.books: dict[str, Book] = {}
        self.line: Line | None = None

    async def connect(self) -> Line:
        """Open the stream or resume it."""
        self.connections += 1
        line = Line(self.channel, self.key)
        welcome = await line.welcome(stream_id=self.stream_id, last_seen=self.seen, **self.hello)
        self.stream_id = welcome.stream_id
        self.kept = [item for item in self.kept if item.sequence > welcome.last_seen]
        self.line = line
        for item in list(self.kept):
            await self._write(item)
        return line

    async def put(self, **item: Any) -> int:
        """Number an item, store it, and send it if there is a connection."""
        self.sent += 1
        self.kept.append(pb.TrainRequest(sequence=self.sent, **item))
        if self.line is not None:
            await self._write(self.kept[-1])
        return self.sent

    async def acknowledge(self) -> None:
        """Acknowledge all received items."""
        await self._write(pb.TrainRequest(acknowledge=pb.TrainAcknowledge(sequence=self.seen)))

    def cut(self) -> None:
        """Break the connection."""
        if self.line is not None:
            self.line.call.cancel()
            self.line = None

    async def until(self, enough: Callable[[Trainer], bool]) -> None:
        """Receive and respond until `enough`, reconnecting after each cut."""
        while not enough(self):
            try:
                if self.line is None:
                    await self.connect()
                await self.one()
            except Cut:
                self.cut()

    async def one(self) -> pb.TrainResponse:
        """Receive one item."""
        assert self.line is not None
        item = await self.line.read()
        assert item is not None, "the server ended the stream"
        last = self._count()
        if last and self.loses:
            raise Cut
        if item.sequence:
            assert item.sequence == self.seen + 1, "items count up without gaps"
            self.seen = item.sequence
        await self._take(item)
        if last:
            raise Cut
        return item

    def rollout(self, uid: str) -> rpb.Rollout:
        """The finished rollout with this uid."""
        (found,) = [rollout for rollout in self.outcomes if rollout.uid == uid]
        return found

    async def _take(self, item: pb.TrainResponse) -> None:
        self.items.append(item)
        match item.WhichOneof("item"):
            case "started":
                self.started.append(item.started.rollout)
            case "refused":
                self.refused.append(item.refused)
            case "ask":
                self.asks.append(item.ask)
                if self.automatic:
                    await self.complete(item.ask)
            case "event":
                self.events.append(item.event)
            case "outcome":
                self.outcomes.append(item.outcome.rollout)
            case "acknowledge":
                self.kept = [kept for kept in self.kept if kept.sequence > item.acknowledge.sequence]
        if item.sequence and self.automatic and self.line is not None:
            await self.acknowledge()

    async def complete(self, ask: cpb.CompleteRequest) -> None:
        """Generate and send a completion."""
        self.generated[ask.turn_key] += 1
        book = self.books.setdefault(ask.uid, Book(self.answer))
        await self.put(answer=pb.TrainAnswer(turn_key=ask.turn_key, response=book.complete(ask)))

    async def reject(self, ask: cpb.CompleteRequest, code: grpc.StatusCode, **fields: Any) -> None:
        """Refuse a completion request."""
        await self.put(reject=pb.TrainReject(turn_key=ask.turn_key, code=code.value[0], **fields))

    async def _write(self, item: pb.TrainRequest) -> None:
        assert self.line is not None
        await self.line.write(item)
        if self._count():
            raise Cut

    def _count(self) -> bool:
        """Count an item on the wire; return whether the connection breaks at it."""
        self.on_wire += 1
        return self.on_wire == self.cut_after


def kind(item: pb.TrainResponse) -> str | None:
    """The kind of an item."""
    return item.WhichOneof("item")


FULL = event_pb2.EVENT_DETAIL_FULL
