"""The HTTP gateway inside the server's process: uvicorn on the same loop, a channel to the server's Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import grpc
import uvicorn
from rollout_gateway.app import create_app
from rollout_gateway.settings import GatewaySettings

from rollout_server.settings import Settings


class _Uvicorn(uvicorn.Server):
    """uvicorn without signal handlers of its own: the server decides when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


class HttpServer:
    """Listens on the HTTP port and translates to gRPC."""

    def __init__(self, target: str, settings: Settings) -> None:
        options = [
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.enable_http_proxy", 0),
        ]
        self._settings = settings
        self._channel = grpc.aio.insecure_channel(target, options=options)
        app = create_app(
            self._channel,
            GatewaySettings(
                detach_grace_seconds=settings.detach_grace_seconds,
                max_body_bytes=settings.max_request_bytes,
                max_metadata_bytes=settings.max_metadata_bytes,
            ),
        )
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=5,
                # Longer than clients keep theirs: a request into a connection that is being closed is lost.
                timeout_keep_alive=75,
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listens and returns the port. Raises OSError where it cannot be had."""
        listener = _listen(self._settings.host, self._settings.http_port)
        port: int = listener.getsockname()[1]
        self._task = asyncio.create_task(self._uvicorn.serve(sockets=[listener]), name="http")
        while not self._uvicorn.started:
            if self._task.done():
                self._task.result()
                raise RuntimeError("the HTTP server did not start")
            await asyncio.sleep(0.005)
        return port

    async def stop(self) -> None:
        """Answers what is under way, then stops."""
        self._uvicorn.should_exit = True
        if self._task is not None:
            await self._task
        await self._channel.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error
    listener.listen(4096)
    listener.setblocking(False)
    return listener
