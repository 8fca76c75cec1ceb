"""A stream of one of several servers, which is found out when the first item is wanted."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar

_Item = TypeVar("_Item")


class _StreamCall(Protocol):
    def cancel(self) -> bool: ...

    def __aiter__(self) -> AsyncIterator[Any]: ...


_SomeCall = TypeVar("_SomeCall", bound=_StreamCall)


class Relay(Generic[_Item]):
    """What routes use of a call with a stream of answers: its items, and `cancel`.

    `find` is given the relay, begins calls through `begin`, and returns the items. Raises grpc.aio.AioRpcError as a call does.
    """

    def __init__(self, find: Callable[["Relay[_Item]"], Awaitable[AsyncIterator[_Item]]]) -> None:
        self._find = find
        self._items: AsyncIterator[_Item] | None = None
        self._call: _StreamCall | None = None
        self._cancelled = False

    def __aiter__(self) -> "Relay[_Item]":
        return self

    async def __anext__(self) -> _Item:
        if self._items is None:
            self._items = await self._find(self)
        return await anext(self._items)

    def begin(self, call: _SomeCall) -> _SomeCall:
        """Makes a call the one that `cancel` ends."""
        self._call = call
        if self._cancelled:
            call.cancel()
        return call

    def cancel(self) -> bool:
        """Ends the call under way, and those that would follow. Does nothing once the stream has ended."""
        self._cancelled = True
        return self._call is not None and self._call.cancel()


async def chained(first: _Item, rest: AsyncIterator[_Item]) -> AsyncIterator[_Item]:
    """The first item, then the others."""
    yield first
    async for item in rest:
        yield item
