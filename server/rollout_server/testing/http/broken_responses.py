"""Responses that break their connection, for `FaultKind.RESET`, `CLOSED`, `SILENCE` and `TRUNCATED`.

They work on `HttpServer` only, which puts the transport and an event for its own end into the scope's state.
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
    """Another response, sent after `delay` seconds unless caller or server are gone by then; None: never sent.

    `sending` is called when it goes out.
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
    """A TCP reset in place of an answer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = scope["state"]["transport"].get_extra_info("socket")
        # A duplicate has the same options; event loops differ in what they let one do to their own socket.
        with socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
            duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
        await _abort(scope, receive)


class Closed(Response):
    """The end of the connection in place of an answer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["transport"].close()
        await _wait_for_disconnect(receive)


class Truncated(Response):
    """The beginning of a body, then the connection is closed, `_MISSING_BYTES` before the announced end."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.body, fault.status, dict(fault.headers))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers["content-length"] = str(len(self.body) + _MISSING_BYTES)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        scope["state"]["transport"].close()
        await _wait_for_disconnect(receive)


def broken_response(fault: Fault) -> Response | None:
    """The response that commits a fault of the connection or of the status; None for silence.

    The kinds that look like completions are no business of this module.
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
    """Whether caller or server went away within `seconds`; waits that long, or for ever."""
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
