"""Events as a stream of server-sent events (WHATWG HTML, 9.2)."""

import asyncio
import logging
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

import grpc
import msgspec
from osmosis.rollout.v1 import event_pb2
from starlette.responses import StreamingResponse
from starlette.types import Message, Send

from rollout_gateway.calls import StreamEndedEarly
from rollout_gateway.follow import Events
from rollout_gateway.rest.proto_json import event_json

_LOG = logging.getLogger(__name__)
_RETRY: Final = b"retry: 1000\n\n"
_KEEP_ALIVE: Final = b": keep-alive\n\n"
_BEYOND_ASCII: Final = re.compile(r"[^\x00-\x7f]")
_BREAKS: Final = str.maketrans("\r\n", "  ")


def frame(event: event_pb2.RolloutEvent, detail: int) -> bytes:
    """The frame of an event: `id` is its sequence, `event` its kind, `data` its JSON on one line of ASCII.

    An event that is not recorded has no id. One of an unknown kind has nothing but its id, which readers take note of without
    being told of an event.
    """
    identity = f"id: {event.sequence}\n" if event.sequence else ""
    found = event_json(event, detail)
    if found is None:
        return f"{identity}\n".encode() if identity else b""
    return f"{identity}event: {found['event']}\ndata: {one_line(msgspec.json.encode(found).decode())}\n\n".encode()


def one_line(text: str) -> str:
    """A JSON text without line breaks and in ASCII: readers differ in what they take for a break and for a character.

    Line breaks stand between a text's tokens only, all else that is not ASCII within its strings.
    """
    text = text.translate(_BREAKS) if "\n" in text or "\r" in text else text
    return text if text.isascii() else _BEYOND_ASCII.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x10000:
        return f"\\u{code:04x}"
    code -= 0x10000
    return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"


class EventStream(StreamingResponse):
    """A response of server-sent events.

    It ends with the events, when the client leaves, and where the server cannot be reached any more: the client then comes
    back and is told why. After `keep_alive_seconds` without an event a comment is sent.
    """

    media_type = "text/event-stream"

    def __init__(self, events: Events, detail: int, keep_alive_seconds: float, request_id: str) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        self._frames = _frames(events, detail, request_id)
        super().__init__(self._frames, headers=headers)
        self._keep_alive_seconds = keep_alive_seconds
        self._last_sent = 0.0

    async def stream_response(self, send: Send) -> None:
        """Sends the events, and comments between them."""

        async def write(message: Message) -> None:
            self._last_sent = asyncio.get_running_loop().time()
            await send(message)

        keeping = asyncio.create_task(self._keep_alive(write))
        try:
            async with aclosing(self._frames):
                await super().stream_response(write)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    async def _keep_alive(self, send: Send) -> None:
        while True:
            quiet = asyncio.get_running_loop().time() - self._last_sent
            if quiet >= self._keep_alive_seconds:
                await send({"type": "http.response.body", "body": _KEEP_ALIVE, "more_body": True})
            else:
                await asyncio.sleep(self._keep_alive_seconds - quiet)


async def _frames(events: Events, detail: int, request_id: str) -> AsyncGenerator[bytes, None]:
    yield _RETRY
    try:
        async with aclosing(events):
            async for event in events:
                if content := frame(event, detail):
                    yield content
    except (grpc.aio.AioRpcError, StreamEndedEarly) as error:
        why = error.code().name if isinstance(error, grpc.aio.AioRpcError) else "ended early"
        _LOG.warning("request %s: a stream of events broke off: %s", request_id, why)
