"""TrainerService: streams of trainers that connect as clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc
from osmosis.rollout.v1 import trainer_service_pb2 as pb
from osmosis.rollout.v1 import trainer_service_pb2_grpc

from rollout_server.core.error import Draining, InvalidRequest, Violation
from rollout_server.edge.rpc.caller import caller
from rollout_server.edge.stream.connection import serve_connection
from rollout_server.edge.stream.dispatcher import MOST_CREDIT, Dispatcher
from rollout_server.edge.stream.streams import StreamConnection
from rollout_server.edge.wire import train as wire
from rollout_server.runtime.start_request import Caller

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_HELLO_SECONDS = 30.0


class TrainerService(trainer_service_pb2_grpc.TrainerServiceServicer):
    """Serves trainers' streams."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    async def Train(  # noqa: N802 - the contract's name
        self, request_iterator: AsyncIterator[pb.TrainRequest], context: _Context
    ) -> AsyncIterator[pb.TrainResponse]:
        """Serve one connection of a stream."""
        hello = await _hello(request_iterator)
        who = caller()
        connection = self._connect(hello, who)
        async with aclosing(serve_connection(self._dispatcher, connection, request_iterator, who)) as items:
            async for item in items:
                yield item

    def _connect(self, hello: pb.TrainHello, who: Caller) -> StreamConnection:
        """Open a new stream, or resume one. Raise the errors of `Streams`."""
        dispatcher, detail = self._dispatcher, wire.detail(hello)
        if not 1 <= hello.credit <= MOST_CREDIT:
            raise InvalidRequest(Violation("hello.credit", f"is {hello.credit}; it must be from 1 to {MOST_CREDIT}"))
        if hello.stream_id:
            connection = dispatcher.streams.resume(hello.stream_id, who.name, hello.last_seen)
            dispatcher.acknowledge(connection.stream, hello.last_seen, who)
        elif hello.last_seen:
            raise InvalidRequest(Violation("hello.last_seen", "must be 0 without a stream_id"))
        elif dispatcher.registry.draining:
            raise Draining("the server is stopping and accepts no new trainers", retry_after=1.0)
        else:
            connection = dispatcher.streams.open(who.name)
        connection.stream.completions.credit, connection.stream.detail = hello.credit, detail
        connection.stream.idle.wanted = hello.idle
        return connection


async def _hello(items: AsyncIterator[pb.TrainRequest]) -> pb.TrainHello:
    """Return the first item. Raise `InvalidRequest` if it is not a `hello` or does not arrive in time."""
    wanted = "the first item must be `hello`"
    try:
        first = await asyncio.wait_for(anext(items), _HELLO_SECONDS)
    except TimeoutError:
        raise InvalidRequest(Violation("hello", f"{wanted}, but none arrived within {_HELLO_SECONDS:g} s")) from None
    except StopAsyncIteration:
        raise InvalidRequest(Violation("hello", f"{wanted}, but the stream ended without items")) from None
    kind = first.WhichOneof("item")
    if kind != "hello":
        raise InvalidRequest(Violation(kind or "item", f"{wanted}, before all others"))
    if first.sequence:
        raise InvalidRequest(Violation("sequence", "must be unset in `hello`"))
    return first.hello
