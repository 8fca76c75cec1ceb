"""The gRPC server of `rollout serve`, and its Unix socket for the gateway in the same process."""

from __future__ import annotations

import errno
import os
import socket
import stat
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import grpc
from osmosis.rollout.v1 import (
    agent_service_pb2,
    agent_service_pb2_grpc,
    rollout_service_pb2,
    rollout_service_pb2_grpc,
    trainer_service_pb2,
    trainer_service_pb2_grpc,
)

from rollout_server.edge.rpc.agent_service import AgentService
from rollout_server.edge.rpc.caller import Admit, AdmitModel
from rollout_server.edge.rpc.interceptor import RequestInterceptor
from rollout_server.edge.rpc.listener import RpcListener, RpcSettings
from rollout_server.edge.rpc.service import RolloutService
from rollout_server.edge.rpc.train_service import TrainerService

AGENTS = agent_service_pb2.DESCRIPTOR.services_by_name["AgentService"].full_name
SERVICE = rollout_service_pb2.DESCRIPTOR.services_by_name["RolloutService"].full_name
TRAINERS = trainer_service_pb2.DESCRIPTOR.services_by_name["TrainerService"].full_name


class CallRouter(grpc.aio.ServerInterceptor, ABC):
    """Interceptor that passes calls for rollouts of other servers on to these. It runs after the key check."""

    @abstractmethod
    def admit_model(self, admit: AdmitModel, header: str) -> str | None:
        """Return the uid of the rollout to which the model key of a header belongs, which `admit` knows for this server."""


class RpcServer(RpcListener):
    """Serves RolloutService, TrainerService and AgentService if given, health and reflection.

    `router`: passes calls on, before the services get them.
    """

    def __init__(
        self,
        service: RolloutService,
        settings: RpcSettings,
        admit: Admit,
        trainers: TrainerService | None = None,
        agents: AgentService | None = None,
        router: CallRouter | None = None,
    ) -> None:
        admit_model: AdmitModel = (lambda header: None) if agents is None else agents.key_uid
        if router is not None:
            admit_model = partial(router.admit_model, admit_model)
        self._boundary = RequestInterceptor(admit, admit_model)
        services: dict[str, Callable[[grpc.aio.Server], None]] = {
            SERVICE: partial(rollout_service_pb2_grpc.add_RolloutServiceServicer_to_server, service)
        }
        if trainers is not None:
            services[TRAINERS] = partial(trainer_service_pb2_grpc.add_TrainerServiceServicer_to_server, trainers)
        if agents is not None:
            services[AGENTS] = partial(agent_service_pb2_grpc.add_AgentServiceServicer_to_server, agents)
        super().__init__(settings, [self._boundary] if router is None else [self._boundary, router], services)

    def end_revoked(self) -> None:
        """End the calls whose keys are not valid any more."""
        self._boundary.end_revoked()


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
