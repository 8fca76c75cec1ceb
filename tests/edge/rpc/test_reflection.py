"""A client without generated code that uses only reflection."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from rollout_server.testing.trainer import StrictTrainer

from tests.support.server_client import CHANNEL_OPTIONS, Caller

SERVICE = "osmosis.rollout.v1.RolloutService"


class Stranger:
    """Call rpcs by name. It is synchronous, so it runs in a thread."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._database = ProtoReflectionDescriptorDatabase(channel)
        self._service = DescriptorPool(self._database).FindServiceByName(SERVICE)

    @property
    def services(self) -> set[str]:
        """The services that the server lists."""
        return set(self._database.get_services())

    @property
    def methods(self) -> set[str]:
        """The rpcs of the service."""
        return set(self._service.methods_by_name)

    def call(self, name: str, **fields: Any) -> Any:
        """Build a request, call the rpc and read the response."""
        method = self._service.methods_by_name[name]
        request = message_factory.GetMessageClass(method.input_type)(**fields)
        rpc: Any = self._channel.unary_unary(
            f"/{SERVICE}/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
        )
        return rpc(request, timeout=60)


def visit(address: str, trainer_url: str) -> None:
    """Run the whole client."""
    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stranger = Stranger(channel)
        assert stranger.services == {
            SERVICE,
            "osmosis.rollout.v1.AgentService",
            "osmosis.rollout.v1.TrainerService",
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        assert {"StartRollout", "RunRollout", "WatchRollout", "WaitRollout", "GetServerInfo"} <= stranger.methods
        assert "http_masked" in stranger.call("GetServerInfo").features
        started = stranger.call(
            "StartRollout",
            spec={
                "rollout_id": "stranger",
                "agent": "calculator",
                "messages": [{"json": '{"role": "user", "content": "What is 5 plus 3?"}'}],
                "completions": {"url": trainer_url},
                "tokenizer": {"name": "toy"},
                "limits": {"time": {"seconds": 50}},
            },
        )
        rollout = stranger.call("WaitRollout", uid=started.rollout.uid, view=4).rollout
        assert (
            rollout.DESCRIPTOR.fields_by_name["state"]
            .enum_type.values_by_number[rollout.state]
            .name.endswith("FINISHED")
        )
        assert rollout.outcome.stop.reason == "stop"
        assert len(rollout.outcome.messages) == 4
        assert sum(rollout.outcome.samples[0].response_mask) == rollout.metrics.generated_tokens


async def test_a_client_that_knows_only_reflection_plays_a_rollout(caller: Caller, trainer: StrictTrainer) -> None:
    await asyncio.to_thread(visit, caller.address, trainer.url)
