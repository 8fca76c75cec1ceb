"""One connection of a stream: what the trainer sends is taken while what is due to it goes out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from rollout_server.edge.stream.dispatcher import Dispatcher
from rollout_server.edge.stream.streams import StreamConnection
from rollout_server.edge.wire import train as wire
from rollout_server.runtime.start_request import Caller

_LOOKS = 5
_PAUSE = 0.02


async def serve_connection(
    dispatcher: Dispatcher, connection: StreamConnection, items: AsyncIterator[wire.TrainerItem], caller: Caller
) -> AsyncGenerator[wire.Item, None]:
    """Yields what is sent, until the trainer is done. Raises RolloutError for what ends the connection otherwise."""
    stream = connection.stream
    reader = asyncio.create_task(_take(dispatcher, connection, items, caller), name="read from a trainer")
    reader.add_done_callback(connection.read)
    try:
        yield stream.connect()
        while True:
            if connection.ending is not None:
                raise connection.ending
            if reader.done() and not stream.closed:
                reader.result()
                stream.close()
            item = stream.next()
            if item is not None:
                yield item
            elif stream.has_undelivered or not (stream.closed or stream.leaving):
                await stream.wait_for_items()
            elif stream.closed or stream.leaving is None:
                return
            else:
                raise stream.leaving
    finally:
        reader.cancel()
        dispatcher.streams.disconnect(connection)


async def _take(
    dispatcher: Dispatcher, connection: StreamConnection, items: AsyncIterator[wire.TrainerItem], caller: Caller
) -> None:
    """Takes items until the trainer says that it is done."""
    async for item in items:
        if connection.ending is not None:
            return
        await dispatcher.take(connection.stream, item, caller)
    # gRPC tells of a call that broke as if its sender were done, and a moment later cancels it, and this with it.
    for _ in range(_LOOKS):
        await asyncio.sleep(_PAUSE)
