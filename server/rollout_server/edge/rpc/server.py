"""The gRPC server of `rollout serve`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import grpc
from osmosis.rollout.v1 import agent_service_pb2_grpc, rollout_service_pb2_grpc, trainer_service_pb2_grpc

from rollout_server.edge.rpc.agent_service import AgentService
from rollout_server.edge.rpc.caller import AGENTS, SERVICE, TRAINERS, Admit, AdmitModel
from rollout_server.edge.rpc.interceptor import RequestInterceptor
from rollout_server.edge.rpc.listener import RpcListener, RpcSettings
from rollout_server.edge.rpc.service import RolloutService
from rollout_server.edge.rpc.train_service import TrainerService


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
        boundary = RequestInterceptor(admit, admit_model)
        self.open_calls = boundary.open_calls
        services: dict[str, Callable[[grpc.aio.Server], None]] = {
            SERVICE: partial(rollout_service_pb2_grpc.add_RolloutServiceServicer_to_server, service)
        }
        if trainers is not None:
            services[TRAINERS] = partial(trainer_service_pb2_grpc.add_TrainerServiceServicer_to_server, trainers)
        if agents is not None:
            services[AGENTS] = partial(agent_service_pb2_grpc.add_AgentServiceServicer_to_server, agents)
        super().__init__(settings, [boundary] if router is None else [boundary, router], services)
