"""The gateway over saved rollouts: the real one, in front of an `ArchiveService`, on a loopback port."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
from osmosis.rollout.v1.rollout_service_pb2_grpc import add_RolloutServiceServicer_to_server
from rollout_gateway.app import create_app
from rollout_gateway.channel import open_channel
from rollout_gateway.http.serve import HttpListener, Listening
from starlette.types import ASGIApp

from rollout_server.archive.service import ArchiveService
from rollout_server.edge.rpc.interceptor import RequestInterceptor
from rollout_server.edge.rpc.sockets import own_socket
from rollout_server.runtime.start_request import Caller

HOST = "127.0.0.1"
_GRACE_SECONDS = 0.2


@asynccontextmanager
async def archive_app(service: ArchiveService) -> AsyncIterator[ASGIApp]:
    """Yield the gateway application over an archive. Whoever reaches it may read all of it."""
    everyone = RequestInterceptor(lambda header: Caller("", admin=True), lambda header: None)
    server = grpc.aio.server(interceptors=[everyone], options=[("grpc.max_send_message_length", -1)])
    add_RolloutServiceServicer_to_server(service, server)
    with own_socket() as socket:
        server.add_insecure_port(f"unix:{socket}")
        await server.start()
        channel = open_channel(f"unix:{socket}")
        try:
            yield create_app(channel)
        finally:
            await channel.close()
            await server.stop(0)


@asynccontextmanager
async def listening(app: ASGIApp, port: int) -> AsyncIterator[str]:
    """Serve an application on a port of the loopback interface, and yield its URL. 0: any free port. Raises OSError."""
    listener = HttpListener(app, Listening(HOST, port, grace_seconds=_GRACE_SECONDS))
    port = await listener.start()
    try:
        yield f"http://{HOST}:{port}/"
    finally:
        await listener.stop()
