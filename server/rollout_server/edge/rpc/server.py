"""The grpc.aio server: options, health, reflection, and the Unix socket for the gateway in the same process."""

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
    agent_service_pb2,
    agent_service_pb2_grpc,
    rollout_service_pb2,
    rollout_service_pb2_grpc,
    trainer_service_pb2,
    trainer_service_pb2_grpc,
)

from rollout_server.edge.rpc.agent_service import AgentService
from rollout_server.edge.rpc.caller import Admit
from rollout_server.edge.rpc.interceptor import RequestInterceptor
from rollout_server.edge.rpc.service import RolloutService
from rollout_server.edge.rpc.tls import ServerTls, server_credentials
from rollout_server.edge.rpc.train_service import TrainerService

AGENTS = agent_service_pb2.DESCRIPTOR.services_by_name["AgentService"].full_name
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
        addresses: `host:port` (port 0: any free port) or `unix:PATH`. Unix sockets have no TLS: their directory's permissions
            control access.
        max_message_bytes: maximum size of a message, decompressed; gRPC stops decompressing at this size.
        tls: certificate of the TCP ports; None: no TLS.
        rollouts: maximum number of rollouts that wait or run.
    """

    addresses: Sequence[str]
    max_message_bytes: int = 64 * 1024 * 1024
    tls: ServerTls | None = None
    rollouts: int = 10_000


class RpcServer:
    """Serves RolloutService, TrainerService and AgentService if given, health and reflection."""

    def __init__(
        self,
        service: RolloutService,
        settings: RpcSettings,
        admit: Admit,
        trainers: TrainerService | None = None,
        agents: AgentService | None = None,
    ) -> None:
        self._settings = settings
        self._health = HealthServicer()
        self._boundary = RequestInterceptor(admit, (lambda header: None) if agents is None else agents.key_uid)
        self._server = grpc.aio.server(interceptors=[self._boundary], options=_options(settings))
        rollout_service_pb2_grpc.add_RolloutServiceServicer_to_server(service, self._server)
        self._names = [SERVICE]
        if trainers is not None:
            trainer_service_pb2_grpc.add_TrainerServiceServicer_to_server(trainers, self._server)
            self._names.append(TRAINERS)
        if agents is not None:
            agent_service_pb2_grpc.add_AgentServiceServicer_to_server(agents, self._server)
            self._names.append(AGENTS)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
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

    def end_revoked(self) -> None:
        """End the calls whose keys are not valid any more."""
        self._boundary.end_revoked()

    async def stop(self, grace: float) -> None:
        """Stop the server. Calls that are still open after `grace` seconds are cancelled."""
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
        ("grpc.so_reuseport", 0),
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


SOCKET_PREFIX = "rollout-"
"""Prefix of the socket directories' names, in the system's temporary directory."""
_SETTLED_SECONDS = 60.0
"""Minimum age of a socket that is checked: a socket that is being opened refuses connections, too."""
SOCKET_NAME = "grpc.sock"


@contextmanager
def own_socket() -> Iterator[Path]:
    """Yield the path for a server's socket, in a directory that only its user can enter."""
    remove_stale_sockets()
    with tempfile.TemporaryDirectory(prefix=SOCKET_PREFIX) as directory:
        yield Path(directory) / SOCKET_NAME


def remove_stale_sockets() -> None:
    """Remove directories that killed servers of this user left behind: those whose socket has no listener.

    A directory that contains anything else, or no socket yet, is kept.
    """
    for directory in Path(tempfile.gettempdir()).glob(f"{SOCKET_PREFIX}*"):
        with suppress(OSError):
            if _is_stale(directory):
                (directory / SOCKET_NAME).unlink()
                directory.rmdir()


def _is_stale(directory: Path) -> bool:
    """Return whether a directory was left behind by a server. Raise OSError if it cannot be inspected."""
    own, path = os.geteuid(), directory / SOCKET_NAME
    directory_stat, socket_stat = directory.lstat(), path.lstat()
    if (
        not stat.S_ISDIR(directory_stat.st_mode)
        or not stat.S_ISSOCK(socket_stat.st_mode)
        or {directory_stat.st_uid, socket_stat.st_uid} != {own}
    ):
        return False
    if os.listdir(directory) != [SOCKET_NAME] or time.time() - socket_stat.st_mtime < _SETTLED_SECONDS:
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # a busy server accepts the connection or returns EAGAIN, not ECONNREFUSED
        return probe.connect_ex(str(path)) == errno.ECONNREFUSED
