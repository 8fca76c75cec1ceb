"""A gRPC receiver of outcomes: it stores the exact bytes and returns scripted responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from osmosis.rollout.v1 import outcome_service_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["OutcomeService"]


@dataclass(frozen=True)
class Delivered:
    """One call: its bytes and metadata, and the parsed request."""

    raw: bytes
    metadata: Mapping[str, str | bytes]

    @property
    def request(self) -> pb.DeliverOutcomeRequest:
        """The request. Raises DecodeError if the bytes are not one."""
        return pb.DeliverOutcomeRequest.FromString(self.raw)


@dataclass(frozen=True)
class Answer:
    """The response to a call: OK, another status with a text, or silence until the caller cancels."""

    code: grpc.StatusCode = grpc.StatusCode.OK
    text: str = ""
    silent: bool = False
    body: bytes = b""


@dataclass
class GrpcReceiver:
    """Respond to the k-th call with the k-th of `answers`; the last one repeats."""

    answers: Sequence[Answer]
    came: list[Delivered] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    port: int = 0

    @property
    def url(self) -> str:
        """Target URL of the receiver."""
        return f"grpc://127.0.0.1:{self.port}"

    async def has(self, count: int) -> Sequence[Delivered]:
        """Wait for this number of calls."""
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.came) >= count)
        return tuple(self.came)

    async def meet(self, raw: bytes, context: Any) -> bytes:
        """Handle a call."""
        self.came.append(Delivered(raw, dict(context.invocation_metadata() or ())))
        async with self.changed:
            self.changed.notify_all()
        answer = self.answers[min(len(self.came), len(self.answers)) - 1]
        if answer.silent:
            await asyncio.Event().wait()
        if answer.code is not grpc.StatusCode.OK:
            await context.abort(answer.code, answer.text)
        return answer.body


@asynccontextmanager
async def grpc_receiver(*answers: Answer, port: int = 0) -> AsyncIterator[GrpcReceiver]:
    """Serve on a free port, or on the given one."""
    receiver = GrpcReceiver(answers or (Answer(),))
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    # Without (de)serializers the handler receives the bytes as they were sent.
    method = grpc.unary_unary_rpc_method_handler(receiver.meet)
    name = SERVICE.methods[0].name
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.full_name, {name: method}),))
    receiver.port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield receiver
    finally:
        await server.stop(0)
