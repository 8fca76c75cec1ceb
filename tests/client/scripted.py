"""A real gRPC server with scripted responses per call, which records its requests."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from osmosis.rollout.v1 import event_pb2, outcome_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb

UID = "0192-scripted_Uid"
DETAILS = "grpc-status-details-bin"
_RPCS = pb.DESCRIPTOR.services_by_name["RolloutService"].methods_by_name


@dataclass(frozen=True)
class Refusal:
    """How a call fails: with the contract's error details, or as gRPC itself fails, without a reason."""

    code: grpc.StatusCode
    text: str = "refused for a reason"
    reason: str = "TEST"
    retry_after: float | None = None
    fields: tuple[tuple[str, str], ...] = ()
    metadata: tuple[tuple[str, str], ...] = ()
    domain: str = "rollout.osmosis"

    def trailers(self) -> tuple[tuple[str, bytes], ...]:
        """The trailing metadata with the error details."""
        if not self.reason:
            return ()
        details: list[Message] = [ErrorInfo(reason=self.reason, domain=self.domain, metadata=dict(self.metadata))]
        if self.retry_after is not None:
            delay = Duration()
            delay.FromMilliseconds(round(1000 * self.retry_after))
            details.append(RetryInfo(retry_delay=delay))
        if self.fields:
            wrong = [BadRequest.FieldViolation(field=name, description=text) for name, text in self.fields]
            details.append(BadRequest(field_violations=wrong))
        status = Status(code=self.code.value[0], message=self.text)
        for detail in details:
            packed = Packed()
            packed.Pack(detail)
            status.details.append(packed)
        return ((DETAILS, status.SerializeToString()),)


@dataclass(frozen=True)
class Held:
    """A response that never arrives. `reached` is set when the call arrives, `left` when its caller has gone."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def hold(self) -> None:
        """Wait forever."""
        self.reached.set()
        await asyncio.Event().wait()


Part: TypeAlias = Message | Refusal | Held


@dataclass(frozen=True)
class Seen:
    """A received call."""

    rpc: str
    request: Any
    metadata: dict[str, str]


class Scripted(grpc.GenericRpcHandler):
    """Respond to each call of an rpc with the next of its lines, a sequence of parts; the last line repeats."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self._lines: dict[str, list[Sequence[Part]]] = defaultdict(list)

    def says(self, rpc: str, *lines: Sequence[Part] | Part) -> None:
        """Set the responses of an rpc, call by call."""
        self._lines[rpc] = [(line,) if isinstance(line, Message | Refusal | Held) else line for line in lines]

    def asked(self, rpc: str) -> list[Any]:
        """The requests of an rpc, in order."""
        return [call.request for call in self.seen if call.rpc == rpc]

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The handler of an rpc."""
        name = handler_call_details.method.rpartition("/")[2]
        method = _RPCS[name]

        async def stream(request: Any, context: Any) -> AsyncIterator[Message]:
            self.seen.append(Seen(name, request, dict(context.invocation_metadata())))
            await context.send_initial_metadata((("x-request-id", "theirs"),))
            async with aclosing(self._parts(name, context)) as parts:
                async for part in parts:
                    yield part

        async def unary(request: Any, context: Any) -> Message:
            self.seen.append(Seen(name, request, dict(context.invocation_metadata())))
            return await anext(self._parts(name, context))

        make: Any = grpc.unary_unary_rpc_method_handler
        if method.server_streaming:
            make = grpc.unary_stream_rpc_method_handler
        return make(
            stream if method.server_streaming else unary,
            request_deserializer=GetMessageClass(method.input_type).FromString,
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )

    async def _parts(self, rpc: str, context: Any) -> AsyncGenerator[Message, None]:
        lines = self._lines[rpc]
        line = lines.pop(0) if len(lines) > 1 else lines[0]
        try:
            for part in line:
                if isinstance(part, Refusal):
                    await context.abort(part.code, part.text, part.trailers())
                elif isinstance(part, Held):
                    await part.hold()
                else:
                    yield part
        finally:  # a caller may leave before this part
            for part in line:
                if isinstance(part, Held):
                    part.left.set()


@dataclass(frozen=True)
class Stage:
    """A scripted server and its address."""

    script: Scripted
    address: str


@asynccontextmanager
async def scripted(credentials: grpc.ServerCredentials | None = None) -> AsyncIterator[Stage]:
    """A scripted server on a free port."""
    script = Scripted()
    server = grpc.aio.server(handlers=(script,))
    at = "127.0.0.1:0"
    port = server.add_secure_port(at, credentials) if credentials is not None else server.add_insecure_port(at)
    await server.start()
    try:
        yield Stage(script, f"127.0.0.1:{port}")
    finally:
        await server.stop(None)


def event(sequence: int, code: str = "note") -> event_pb2.RolloutEvent:
    """A note event."""
    return event_pb2.RolloutEvent(sequence=sequence, note=event_pb2.Note(code=code))


def finished(sequence: int, reason: str = "stop") -> event_pb2.RolloutEvent:
    """The last event."""
    outcome = outcome_pb2.Outcome(stop=outcome_pb2.Stop(reason=reason))
    return event_pb2.RolloutEvent(sequence=sequence, finished=event_pb2.Finished(outcome=outcome))


def watched(*events: event_pb2.RolloutEvent) -> list[Part]:
    """Events as items of a watch."""
    return [pb.WatchRolloutResponse(event=each) for each in events]


def ran(*events: event_pb2.RolloutEvent, uid: str = UID) -> list[Part]:
    """A rollout's start and events as items of a run."""
    started = pb.StartRolloutResponse(rollout=pb.Rollout(uid=uid))
    return [pb.RunRolloutResponse(started=started), *(pb.RunRolloutResponse(event=each) for each in events)]


def rollout(state: pb.RolloutState.ValueType = pb.ROLLOUT_STATE_FINISHED) -> pb.Rollout:
    """A rollout in a state."""
    return pb.Rollout(uid=UID, state=state)
