"""Bodies of requests: the key first, then bytes within a budget, then what is large parsed off the event loop."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import accumulate
from typing import Final, TypeVar

from starlette.requests import Request

from rollout_gateway.calls import Calls
from rollout_gateway.json_body import InvalidBody, demand_json, violation
from rollout_gateway.key_check import KeyCheck

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
    """Reads the bodies of all requests.

    Bodies that are being read or parsed hold `budget` bytes together; one that would hold more is refused. Large ones are
    parsed one at a time: threads take turns at Python anyway, and so the memory of one parsed body is what is needed.
    """

    def __init__(self, keys: KeyCheck, budget: int) -> None:
        self._keys = keys
        self._budget = budget
        self._held = 0
        self._parsing = asyncio.Lock()

    async def read(self, request: Request, calls: Calls, parse: Callable[[bytes], _T]) -> _T:
        """Reads a body and returns what `parse` makes of it, maybe in a thread.

        Nothing of the body is looked at before the server accepted the key of `calls`. Raises grpc.aio.AioRpcError where it
        does not or cannot be asked, Overloaded, InvalidBody, and what the request's stream raises.
        """
        pieces = await self._admitted(request, calls)
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

    async def _admitted(self, request: Request, calls: Calls) -> AsyncIterator[bytes]:
        """The pieces of the body, once the key was accepted."""
        stream = request.stream()
        if "expect" in request.headers:  # reading would tell this client to send its body
            await self._keys.demand(calls)
            return stream
        # uvicorn drops what has arrived when the client leaves, so it is taken while the server looks at the key.
        first = asyncio.ensure_future(anext(stream))
        try:
            await self._keys.demand(calls)
        except BaseException:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            raise
        return _chained(first, stream)

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
