"""One connection of a stream: reads the trainer's items and sends the server's at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from rollout_server.edge.stream.dispatcher import Dispatcher
from rollout_server.edge.stream.streams import StreamConnection
from rollout_server.edge.wire import train as wire
from rollout_server.runtime.start_request import Caller

_LOOKS, _PAUSE = 5, 0.02
"""Number and duration (seconds) of the pauses after the trainer's last item, see `_take`."""


async def serve_connection(
    dispatcher: Dispatcher, connection: StreamConnection, items: AsyncIterator[wire.TrainerItem], caller: Caller
) -> AsyncGenerator[wire.Item, None]:
    """Yield items for the trainer until the stream ends. Raise RolloutError for the status that ends the connection.

    After `stream.wait_for_items` the loop checks every condition again. Whatever changes one of them calls `wake`, so no change
    is missed.
    """
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
    """Process items until the trainer half-closes the stream."""
    async for item in items:
        if connection.ending is not None:
            return
        await dispatcher.take(connection.stream, item, caller)
    # When a connection breaks, gRPC first ends the iterator as if the trainer had half-closed, and cancels the call a moment
    # later. Without this pause, a broken connection would be taken for a closed stream and its rollouts would be cancelled.
    for _ in range(_LOOKS):
        await asyncio.sleep(_PAUSE)
