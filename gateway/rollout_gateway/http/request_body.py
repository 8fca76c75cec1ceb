"""Request bodies: check the key, read within a memory budget, and parse large bodies off the event loop."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import accumulate
from typing import Final, TypeVar

from starlette.requests import Request

from rollout_gateway.calls import Calls
from rollout_gateway.json_body import InvalidBody, demand_json, violation
from rollout_gateway.key_check import KeyCheck

# Bodies up to this size are parsed on the event loop, which takes a few milliseconds at most.
_SMALL_BYTES: Final = 64 * 1024
_SMALL_VALUES: Final = 2_000
# These limits only protect the memory of the parser: parsed values take up to a hundred times the bytes of their text. The
# rollout server has lower limits, which also apply to gRPC.
MAX_VALUES: Final = 1_000_000
MAX_DEPTH: Final = 256

_PIECE: Final = 64 * 1024
_STEPS: Final = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS: Final = bytes(byte for byte in range(256) if byte not in _STEPS)
_T = TypeVar("_T")


class Overloaded(Exception):
    """Bodies in flight use the whole memory budget."""


class RequestBodies:
    """Reads the bodies of all requests.

    Bodies that are being read or parsed share `budget` bytes; a body that does not fit is refused. Large bodies are parsed one
    at a time: the GIL allows no parallel parsing anyway, and memory then holds only one large parsed body.
    """

    def __init__(self, keys: KeyCheck, budget: int) -> None:
        self._keys = keys
        self._budget = budget
        self._held = 0
        self._parsing = asyncio.Lock()

    async def read(self, request: Request, calls: Calls, parse: Callable[[bytes], _T]) -> _T:
        """Read a body and return the result of `parse`, which runs in a thread for large bodies.

        The body is not inspected before the server has accepted the key of `calls`. Raises grpc.aio.AioRpcError if the server
        refuses the key or cannot be reached, Overloaded, InvalidBody, and what the request's stream raises.
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
        """Return the pieces of the body after the server has accepted the key."""
        stream = request.stream()
        if self._keys.check(calls) is None:
            return stream
        if "expect" in request.headers:  # reading sends 100 Continue, which requests the body
            await self._keys.demand(calls)
            return stream
        # uvicorn drops received data when the client disconnects, so take it while the server checks the key.
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
    """Return an upper bound of the number of JSON values. It is cheap, and also counts commas and brackets in strings."""
    return 1 + content.count(b",") + content.count(b"[") + content.count(b"{")


def demand_bounded(content: bytes, max_values: int = MAX_VALUES, max_depth: int = MAX_DEPTH) -> None:
    """Raise InvalidBody for a text with more values, or with deeper nesting.

    A text that is not JSON may pass: the parser stops at its first error.
    """
    if most_values(content) <= min(max_values, max_depth):
        return
    # Without escape sequences, every quote begins or ends a string.
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
