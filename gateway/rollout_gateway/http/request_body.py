"""Bodies of requests: the key first, then bytes within limits and a budget, then what is large parsed off the event loop."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from itertools import accumulate
from typing import Final, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Message, Receive

from rollout_gateway.calls import CallMetadata
from rollout_gateway.key_check import KeyCheck
from rollout_gateway.osmosis_http.sync_body import InvalidBody, demand_json, violation

_DISCARD_SECONDS: Final = 5.0
# Who has sent nothing for so long waits for the answer.
_QUIET_SECONDS: Final = 0.5
_DISCARD_BYTES: Final = 64 * 1024 * 1024
# What is parsed on the event loop takes no more than some milliseconds.
_SMALL_BYTES: Final = 64 * 1024
_SMALL_VALUES: Final = 2_000
# Only what a parser here can hold: parsed values take up to a hundred times the bytes of their text. How many values a rollout may
# have is for the server to say, which also hears of them over gRPC; it takes fewer.
MAX_VALUES: Final = 1_000_000
MAX_DEPTH: Final = 256

_PIECE: Final = 64 * 1024
_STEPS: Final = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS: Final = bytes(byte for byte in range(256) if byte not in _STEPS)
_T = TypeVar("_T")


class Overloaded(Exception):
    """The bodies under way take all the memory that they may."""


class RequestBodies:
    """Reads the bodies of all requests. One over `max_bytes` is answered with 413, one not whole after `seconds` with 408.

    Bodies that are being read or parsed hold `budget` bytes together; one that would hold more is refused. Large ones are
    parsed one at a time: threads take turns at Python anyway, and so the memory of one parsed body is what is needed.
    """

    def __init__(self, keys: KeyCheck, budget: int, max_bytes: int = 16 << 20, seconds: float = 60.0) -> None:
        self._keys = keys
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._budget = budget
        self._held = 0
        self._parsing = asyncio.Lock()

    async def read(self, request: Request, metadata: CallMetadata, parse: Callable[[bytes], _T]) -> _T:
        """Reads a body and returns what `parse` makes of it, maybe in a thread.

        Nothing of the body is looked at before the server accepted the key in `metadata`. Raises grpc.aio.AioRpcError where it
        does not or cannot be asked, Overloaded, InvalidBody, and what the request's stream raises.
        """
        pieces = await self._admitted(request, metadata)
        request.state.key_accepted = True
        content = bytearray()
        try:
            async for chunk in pieces:
                if self._held + len(chunk) > self._budget:
                    raise Overloaded
                self._held += len(chunk)
                content += chunk
            demand_json(request)
            return await self._parsed(content, parse)
        finally:
            self._held -= len(content)

    async def _admitted(self, request: Request, metadata: CallMetadata) -> AsyncIterator[bytes]:
        """The pieces of the body, once the key was accepted."""
        stream = Request(request.scope, self._limited(request)).stream()
        if "expect" in request.headers:  # reading would tell this client to send its body
            await self._keys.demand(metadata)
            return stream
        # uvicorn drops what has arrived when the client leaves, so it is taken while the server looks at the key.
        first = asyncio.ensure_future(anext(stream))
        try:
            await self._keys.demand(metadata)
        except BaseException:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            raise
        return _chained(first, stream)

    def _limited(self, request: Request) -> Receive:
        """What receives a body within the limits: what is declared too large before anything is read, others as they arrive.

        The exceptions pass through the application, so at most `max_bytes` and one chunk are ever held. In both cases the rest of
        the body is still on its way, so the connection cannot be used again.
        """
        taken, declared = 0, request.headers.get("content-length", "")
        ends = asyncio.get_running_loop().time() + self._seconds
        too_large = HTTPException(413, f"The body is larger than {self._max_bytes} bytes", {"connection": "close"})
        too_slow = HTTPException(408, f"The body did not arrive within {self._seconds:g} s", {"connection": "close"})

        async def receive() -> Message:
            nonlocal taken
            if declared.isdecimal() and int(declared[:20]) > self._max_bytes:
                # A client that waits to be told to send its body has not begun, and reading would tell it.
                if request.headers.get("expect", "").lower() != "100-continue":
                    await self._discard(request.receive)
                raise too_large
            try:
                async with asyncio.timeout_at(ends):
                    message = await request.receive()
            except TimeoutError:
                raise too_slow from None
            taken += len(message.get("body", b""))
            if taken > self._max_bytes:
                await self._discard(request.receive)
                raise too_large
            return message

        return receive

    async def _discard(self, receive: Receive) -> None:
        """Reads on for a while: a client that writes before it reads would otherwise find its connection reset, not an answer."""
        left = max(self._max_bytes, _DISCARD_BYTES)
        with suppress(TimeoutError):
            async with asyncio.timeout(_DISCARD_SECONDS):
                while left > 0:
                    message = await asyncio.wait_for(receive(), _QUIET_SECONDS)
                    if not message.get("more_body", False):
                        return
                    left -= len(message["body"])

    async def _parsed(self, content: bytearray, parse: Callable[[bytes], _T]) -> _T:
        if len(content) <= _SMALL_BYTES and most_values(content) <= _SMALL_VALUES:
            return _bounded(content, parse)
        async with self._parsing:
            return await asyncio.to_thread(_bounded, content, parse)


async def _chained(first: Awaitable[bytes], others: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield await first
    async for piece in others:
        yield piece


def _bounded(received: bytearray, parse: Callable[[bytes], _T]) -> _T:
    content = bytes(received)
    demand_bounded(content)
    return parse(content)


def most_values(content: bytes | bytearray) -> int:
    """At least as many values as the text holds; a cheap look, which also counts commas and brackets within strings."""
    return 1 + content.count(b",") + content.count(b"[") + content.count(b"{")


def demand_bounded(content: bytes, max_values: int = MAX_VALUES, max_depth: int = MAX_DEPTH) -> None:
    """Raises InvalidBody for a text of more values, or of more brackets within each other.

    What is no JSON passes as far as it is none: a parser stops there.
    """
    if most_values(content) <= min(max_values, max_depth):
        return
    # Without escapes every quote begins or ends a string.
    text = content.replace(b"\\\\", b"").replace(b'\\"', b"")
    values, depth, in_string = 1, 0, 0
    for start in range(0, len(text), _PIECE):
        parts = text[start : start + _PIECE].split(b'"')
        outside = b"".join(parts[in_string::2])
        in_string ^= (len(parts) - 1) & 1
        values += most_values(outside) - 1
        if values > max_values:
            raise _too_much(f"more than {max_values} values")
        depths = list(accumulate(map(_STEPS.__getitem__, outside.translate(None, _NO_BRACKETS)), initial=depth))
        if max(depths) > max_depth:
            raise _too_much(f"nested deeper than {max_depth}")
        depth = depths[-1]


def _too_much(of_what: str) -> InvalidBody:
    return InvalidBody([violation("too_long", (), f"The body is too large: {of_what}")])
