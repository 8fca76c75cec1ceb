"""Responses that break their connection, for `FaultKind.RESET`, `CLOSED`, `SILENCE` and `TRUNCATED`.

They work only on `HttpServer`, which puts its transport and its shutdown event into the scope's state.
"""

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rollout_server.testing.script import Fault, FaultKind

_RESET_AT_CLOSE: Final = struct.pack("ii", 1, 0)  # SO_LINGER on, for 0 seconds
_MISSING_BYTES: Final = 4096


class DelayedResponse(Response):
    """Sends another response after `delay` seconds (None: never), unless the client disconnects or the server stops before.

    `sending` is called right before the response is sent.
    """

    def __init__(
        self, response: Response | None, delay: float | None, sending: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self._response = response
        self._delay = delay
        self._sending = sending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = await _gone(scope, receive, self._delay) if self._delay != 0 else False
        if self._response is None or gone:
            await _abort(scope, receive)
            return
        if self._sending:
            self._sending()
        await self._response(scope, receive, send)


class Reset(Response):
    """Resets the TCP connection instead of sending a response."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = scope["state"]["transport"].get_extra_info("socket")
        # Some event loops do not allow changes through their own socket object. A duplicate shares its socket options.
        with socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
            duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
        await _abort(scope, receive)


class Closed(Response):
    """Closes the connection instead of sending a response."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["transport"].close()
        await _wait_for_disconnect(receive)


class Truncated(Response):
    """Sends the beginning of a body and closes the connection `_MISSING_BYTES` before the announced end."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.body, fault.status, dict(fault.headers))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers["content-length"] = str(len(self.body) + _MISSING_BYTES)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        scope["state"]["transport"].close()
        await _wait_for_disconnect(receive)


def broken_response(fault: Fault) -> Response | None:
    """Return the response for a fault of the connection or the status; None for silence.

    The kinds that look like completions (`EMPTY_CHOICES`, `NULL_MESSAGE`) must not be passed.
    """
    match fault.kind:
        case FaultKind.SILENCE:
            return None
        case FaultKind.RESET:
            return Reset()
        case FaultKind.CLOSED | FaultKind.LOST:
            return Closed()
        case FaultKind.TRUNCATED:
            return Truncated(fault)
        case _:
            return Response(fault.body, fault.status, dict(fault.headers))


async def _gone(scope: Scope, receive: Receive, seconds: float | None) -> bool:
    """Return whether the client disconnects or the server stops within `seconds`. None waits without limit."""
    ends = {asyncio.create_task(_wait_for_disconnect(receive)), asyncio.create_task(scope["state"]["closing"].wait())}
    done, waiting = await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    return bool(done)


async def _abort(scope: Scope, receive: Receive) -> None:
    scope["state"]["transport"].abort()
    await _wait_for_disconnect(receive)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
