"""A grpc.aio server with health and reflection, and the options of all our servers."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from rollout_server.edge.rpc.local_channel import LocalChannel
from rollout_server.edge.rpc.tls import ServerTls, server_credentials

_SERVING = health_pb2.HealthCheckResponse.SERVING
_LEAST_CALLS = 10_000
_OTHER_CALLS = 2_000


@dataclass(frozen=True, slots=True)
class RpcSettings:
    """How a server listens.

    Args:
        addresses: `host:port` (port 0: any free port) or `unix:PATH`. Unix sockets have no TLS: their directory's permissions
            control access.
        max_message_bytes: maximum size of a message, decompressed; gRPC stops decompressing at this size.
        tls: certificate of the TCP ports; None: no TLS.
        rollouts: maximum number of rollouts that wait or run.
        shares_port: share the TCP ports with other processes of this user (SO_REUSEPORT), which have checked that they are free.
    """

    addresses: Sequence[str]
    max_message_bytes: int = 64 * 1024 * 1024
    tls: ServerTls | None = None
    rollouts: int = 10_000
    shares_port: bool = False


class RpcListener:
    """Serves the given services, health and reflection.

    Args:
        settings: how it listens.
        interceptors: the outermost one first.
        services: full names of the services, each with the function that adds it to the server.
    """

    def __init__(
        self,
        settings: RpcSettings,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        services: Mapping[str, Callable[[grpc.aio.Server], None]],
    ) -> None:
        self._settings = settings
        self._names = tuple(services)
        self._health = HealthServicer()
        self._server = grpc.aio.server(interceptors=interceptors, options=_options(settings))
        self.local_channel = LocalChannel(interceptors, settings.max_message_bytes)
        """A channel of this process to the services."""
        added_to = cast(grpc.aio.Server, _Services(self._server, self.local_channel))
        for add in services.values():
            add(added_to)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, added_to)
        names = (*self._names, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self) -> Sequence[int]:
        """Start to listen. Return the ports, 0 for Unix sockets.

        Raises OSError if an address or a TLS file is not available, and ValueError for invalid TLS files.
        """
        tls = self._settings.tls
        credentials = server_credentials(tls) if tls is not None else None
        ports = [self._listen(address, credentials) for address in self._settings.addresses]
        await self._server.start()
        for name in ("", *self._names):
            await self._health.set(name, _SERVING)
        return ports

    async def say_not_serving(self) -> None:
        """Report NOT_SERVING to health checks."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace: float) -> None:
        """Stop the server. Calls that are still open after `grace` seconds are cancelled."""
        await self._server.stop(grace)
        self.local_channel.cancel()

    def _listen(self, address: str, credentials: grpc.ServerCredentials | None) -> int:
        if address.startswith("unix:"):
            self._server.add_insecure_port(address)
            return 0
        if not self._settings.shares_port:
            _check_free(address)
        if credentials is None:
            return self._server.add_insecure_port(address)
        return self._server.add_secure_port(address, credentials)


class _Services:
    """What generated code adds services to: a server, and the channel to them in this process.

    It does not register their methods by name. For each registered method, grpc.aio keeps a task that waits for the next call, and
    with each call it waits anew for all these tasks: with our 30 methods, that takes much longer than finding a method.
    """

    def __init__(self, *targets: grpc.aio.Server | LocalChannel) -> None:
        self._targets = targets

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        for target in self._targets:
            target.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, *_: object) -> None:
        pass


def _check_free(address: str) -> None:
    """Raise OSError with a clear text if an address is not available, before gRPC fails with its own text."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            raise OSError(error.errno, f"cannot listen on {address}: {error.strerror}") from error


def _options(settings: RpcSettings) -> list[tuple[str, int]]:
    # One call per rollout, and room for others. A pending call takes about 15 KB, also after its client has reset it.
    calls = max(_LEAST_CALLS, settings.rollouts) + _OTHER_CALLS
    return [
        # With port sharing, a second server on the same port would silently take some of the calls.
        ("grpc.so_reuseport", int(settings.shares_port)),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        # A rollout that was accepted must be readable in every view; the reader sets its own limit.
        ("grpc.max_send_message_length", -1),
        # By default gRPC ends calls with a bare CANCELLED when more than 1000 are pending in its core, or one is pending for 30 s.
        # grpc.aio accepts one call per iteration of the event loop, which is slow under load. The registry limits the load instead.
        ("grpc.server.max_pending_requests", calls),
        ("grpc.server.max_pending_requests_hard_limit", calls),
        ("grpc.server_max_unrequested_time_in_server", 86_400),
        # A reset stream counts until gRPC has freed it, so rapidly opening and resetting streams cannot fill the memory.
        # gRPC clients queue calls beyond this limit.
        ("grpc.max_concurrent_streams", calls),
        # Limits what a connection accumulates. Its open calls finish, and clients open a new connection for further calls.
        ("grpc.max_connection_age_ms", 3_600_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Detects a trainer whose machine has disappeared; otherwise its stream would stay open for ever.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
    ]
