"""The grpc.aio server: options, health, reflection, and the Unix socket over which the gateway of its process reaches it."""

from __future__ import annotations

import errno
import os
import socket
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection
from osmosis.rollout.v1 import (
    rollout_service_pb2,
    rollout_service_pb2_grpc,
    trainer_service_pb2,
    trainer_service_pb2_grpc,
)

from rollout_server.edge.rpc.caller import Admit
from rollout_server.edge.rpc.interceptor import RequestInterceptor
from rollout_server.edge.rpc.service import RolloutService
from rollout_server.edge.rpc.tls import ServerTls, server_credentials
from rollout_server.edge.rpc.train_service import TrainerService

SERVICE = rollout_service_pb2.DESCRIPTOR.services_by_name["RolloutService"].full_name
TRAINERS = trainer_service_pb2.DESCRIPTOR.services_by_name["TrainerService"].full_name
_SERVING = health_pb2.HealthCheckResponse.SERVING
_LEAST_CALLS = 10_000
_OTHER_CALLS = 2_000
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass(frozen=True, slots=True)
class RpcSettings:
    """How a server listens.

    Args:
        addresses: `host:port` (port 0: any) or `unix:PATH`. Unix sockets go without TLS: who may open one says its directory.
        max_message_bytes: the largest message, decompressed: gRPC stops decompressing there.
        tls: the certificate of the ports; None: none.
        rollouts: that wait and run at most.
    """

    addresses: Sequence[str]
    max_message_bytes: int = 64 * 1024 * 1024
    tls: ServerTls | None = None
    rollouts: int = 10_000


class RpcServer:
    """Serves RolloutService, TrainerService where there is one, health and reflection."""

    def __init__(
        self, service: RolloutService, settings: RpcSettings, admit: Admit, trainers: TrainerService | None = None
    ) -> None:
        self._settings = settings
        self._health = HealthServicer()
        self._boundary = RequestInterceptor(admit)
        self._server = grpc.aio.server(interceptors=[self._boundary], options=_options(settings))
        rollout_service_pb2_grpc.add_RolloutServiceServicer_to_server(service, self._server)
        self._names = [SERVICE]
        if trainers is not None:
            trainer_service_pb2_grpc.add_TrainerServiceServicer_to_server(trainers, self._server)
            self._names.append(TRAINERS)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*self._names, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self) -> Sequence[int]:
        """Listens. Returns the ports, 0 for Unix sockets.

        Raises OSError where an address or a TLS file cannot be had, ValueError for TLS files that are of no use.
        """
        tls = self._settings.tls
        credentials = server_credentials(tls) if tls is not None else None
        ports = [self._listen(address, credentials) for address in self._settings.addresses]
        await self._server.start()
        for name in ("", *self._names):
            await self._health.set(name, _SERVING)
        return ports

    async def say_not_serving(self) -> None:
        """Tells health checks that this server is going away."""
        await self._health.enter_graceful_shutdown()

    def end_revoked(self) -> None:
        """Ends the calls whose keys are not in force any more."""
        self._boundary.end_revoked()

    async def stop(self, grace: float) -> None:
        """Ends the calls that are left after `grace` seconds."""
        await self._server.stop(grace)

    def _listen(self, address: str, credentials: grpc.ServerCredentials | None) -> int:
        if address.startswith("unix:"):
            self._server.add_insecure_port(address)
            return 0
        _check_free(address)
        if credentials is None:
            return self._server.add_insecure_port(address)
        return self._server.add_secure_port(address, credentials)


def _check_free(address: str) -> None:
    """Raises OSError for an address that cannot be had, before gRPC would write about it in its own words."""
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
    # One for each rollout, and room for others. Each holds about 15 KB until it is picked up, also if its client has reset it.
    calls = max(_LEAST_CALLS, settings.rollouts) + _OTHER_CALLS
    return [
        # A second server on the same port would share it silently.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        # What was taken can be read, in whatever view; the reader's own limit holds.
        ("grpc.max_send_message_length", -1),
        # gRPC answers a bare CANCELLED when more than a thousand calls wait to be picked up by Python, or one waits for 30 s.
        # The registry admits instead: one call is picked up in each round of the event loop, which is long while it is busy.
        ("grpc.server.max_pending_requests", calls),
        ("grpc.server.max_pending_requests_hard_limit", calls),
        ("grpc.server_max_unrequested_time_in_server", 86_400),
        # Streams that were reset count until gRPC has let go of them, so opening and resetting them in a row fills no memory.
        # gRPC's clients wait with calls beyond it.
        ("grpc.max_concurrent_streams", calls),
        # What a connection gathers ends with it. Its calls go on to their ends, and clients connect anew for the next ones.
        ("grpc.max_connection_age_ms", 3_600_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # A trainer whose machine is gone says nothing: its stream would never be cut.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
    ]


SOCKET_PREFIX = "rollout-"
"""How the name of such a directory begins. It is in the system's temporary directory."""
_SETTLED_SECONDS = 60.0
"""The age from which a socket is asked: one that is being opened refuses connections, too."""
SOCKET_NAME = "grpc.sock"


@contextmanager
def own_socket() -> Iterator[Path]:
    """Where a server opens its socket, in a directory that only its user can enter."""
    remove_stale_sockets()
    with tempfile.TemporaryDirectory(prefix=SOCKET_PREFIX) as directory:
        yield Path(directory) / SOCKET_NAME


def remove_stale_sockets() -> None:
    """Removes directories that servers of this user left behind when they were killed: those with a socket on which nobody listens.

    One that holds anything else, or is still without a socket, is left alone.
    """
    for directory in Path(tempfile.gettempdir()).glob(f"{SOCKET_PREFIX}*"):
        with suppress(OSError):
            if _is_stale(directory):
                (directory / SOCKET_NAME).unlink()
                directory.rmdir()


def _is_stale(directory: Path) -> bool:
    """Raises OSError where it cannot be looked at."""
    own, path = os.geteuid(), directory / SOCKET_NAME
    about, held = directory.lstat(), path.lstat()
    if not stat.S_ISDIR(about.st_mode) or not stat.S_ISSOCK(held.st_mode) or {about.st_uid, held.st_uid} != {own}:
        return False
    if os.listdir(directory) != [SOCKET_NAME] or time.time() - held.st_mtime < _SETTLED_SECONDS:
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # a server that is busy takes a connection as well, or says that its queue is full
        return probe.connect_ex(str(path)) == errno.ECONNREFUSED
