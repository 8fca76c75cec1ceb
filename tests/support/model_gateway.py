"""A scripted AgentService, a gateway in front of it, and a client for its model endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
from google.rpc.error_details_pb2 import ErrorInfo
from osmosis.rollout.v1 import agent_service_pb2 as pb
from osmosis.rollout.v1.agent_service_pb2_grpc import AgentServiceServicer, add_AgentServiceServicer_to_server
from osmosis.rollout.v1.rollout_service_pb2_grpc import add_RolloutServiceServicer_to_server
from rollout_gateway.app import create_app
from rollout_gateway.channel import open_channel
from rollout_gateway.settings import GatewaySettings

from tests.support.gateways import http_client, listening
from tests.support.scripted_server import UID, Refusal, ScriptedServer

KEY = f"rk_{UID}.secret"
FOREIGN = Refusal(grpc.StatusCode.PERMISSION_DENIED, "this key is not valid for this rollout")
Reply = dict[str, Any]


def said(content: str | None = None, **fields: Any) -> Reply:
    """An assistant message."""
    return {"role": "assistant", "content": content, **fields}


def function_call(name: str, arguments: str, call_id: str = "call_1") -> Reply:
    """A tool call of an assistant message."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def named(reason: str, code: grpc.StatusCode, text: str = "refused", **metadata: str) -> Refusal:
    """A refusal with this reason."""
    return Refusal(code, text, (ErrorInfo(reason=reason, domain="rollout.osmosis", metadata=metadata),))


@dataclass
class ScriptedAgentService(AgentServiceServicer):
    """Records calls and returns `reply` once `go` is set. An rpc that is named in `refusals` fails after `go`."""

    reply: Reply = field(default_factory=lambda: said("Hello."))
    finish_reason: str = "stop"
    key: str = KEY
    model: str = "rollout"
    over: bool = False
    refusals: dict[str, Refusal] = field(default_factory=dict)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    calls: list[pb.CallModelRequest] = field(default_factory=list)
    counted: list[pb.CountTokensRequest] = field(default_factory=list)
    finished: list[pb.FinishRolloutRequest] = field(default_factory=list)
    confirmed: list[str] = field(default_factory=list)
    #: The calls and the confirmations that have ended, in order.
    order: list[str] = field(default_factory=list)
    #: Confirmations wait for it.
    may_confirm: asyncio.Event = field(default_factory=asyncio.Event)
    confirming: asyncio.Event = field(default_factory=asyncio.Event)
    checks: int = 0

    def __post_init__(self) -> None:
        self.go.set()
        self.may_confirm.set()

    async def _enter(self, rpc: str, request: Any, context: Any) -> None:
        metadata = dict(context.invocation_metadata())
        if request.uid != UID or metadata.get("authorization") != f"Bearer {self.key}":
            await FOREIGN.abort(context)
        if rpc in self.refusals:
            await self.refusals[rpc].abort(context)

    async def GetModelAccess(self, request: Any, context: Any) -> pb.GetModelAccessResponse:
        self.checks += 1
        await self._enter("GetModelAccess", request, context)
        return pb.GetModelAccessResponse(model=self.model)

    async def CallModel(self, request: Any, context: Any) -> AsyncIterator[pb.CallModelResponse]:
        self.calls.append(request)
        self.order.append("call")
        self.waiting.set()
        begun = pb.CompletionBegun(completion_id=self.completion().id)
        try:
            if "CallModel" not in self.refusals:
                yield pb.CallModelResponse(begun=begun)
            await self.go.wait()
        except (asyncio.CancelledError, GeneratorExit):
            self.left.set()
            raise
        await self._enter("CallModel", request, context)
        yield pb.CallModelResponse(completion=self.completion())

    def completion(self) -> pb.ModelCompletion:
        """The completion of the latest call."""
        return pb.ModelCompletion(
            id=f"cmp{len(self.calls)}",
            message_json=json.dumps(self.reply),
            finish_reason=self.finish_reason,
            prompt_tokens=11,
            generated_tokens=7,
            turn=1,
        )

    async def ConfirmCompletion(self, request: Any, context: Any) -> pb.ConfirmCompletionResponse:
        await self._enter("ConfirmCompletion", request, context)
        self.confirming.set()
        await self.may_confirm.wait()
        self.confirmed.append(request.completion_id)
        self.order.append("confirmation")
        return pb.ConfirmCompletionResponse()

    async def CountTokens(self, request: Any, context: Any) -> pb.CountTokensResponse:
        await self._enter("CountTokens", request, context)
        self.counted.append(request)
        return pb.CountTokensResponse(tokens=42)

    async def FinishRollout(self, request: Any, context: Any) -> pb.FinishRolloutResponse:
        await self._enter("FinishRollout", request, context)
        self.finished.append(request)
        return pb.FinishRolloutResponse(repeated=len(self.finished) > 1)


@dataclass(frozen=True)
class ModelGateway:
    """A gateway on a real port, in front of a scripted AgentService."""

    server: ScriptedAgentService
    rollouts: ScriptedServer
    http: httpx.AsyncClient
    host: str
    port: int
    #: Of the gRPC server.
    address: str

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """Send a request below the endpoint's base, with the rollout's key unless another one is given."""
        credentials = {} if "x-api-key" in headers else {"authorization": f"Bearer {KEY}"}
        return await self.http.post(f"/r/{UID}/{path}", json=body, headers=credentials | headers)

    async def get(self, path: str) -> httpx.Response:
        """Read a path below the endpoint's base."""
        return await self.http.get(f"/r/{UID}/{path}", headers={"authorization": f"Bearer {KEY}"})

    async def confirmed(self, *ids: str) -> None:
        """Wait until as many completions are confirmed, which must be these."""
        while len(self.server.confirmed) < len(ids):  # noqa: ASYNC110 - no event reports it
            await asyncio.sleep(0.001)
        assert self.server.confirmed == [*ids]

    @property
    def call(self) -> pb.CallModelRequest:
        """The latest call."""
        return self.server.calls[-1]

    @property
    def history(self) -> list[Any]:
        """The messages of the latest call."""
        return [json.loads(each.json) for each in self.call.prompt.messages]


@contextlib.asynccontextmanager
async def agent_server(*services: ScriptedAgentService | ScriptedServer) -> AsyncIterator[str]:
    """Serve scripted services and yield their address, a Unix socket with a short path."""
    with tempfile.TemporaryDirectory(prefix="gw") as folder:
        address = f"unix:{Path(folder) / 's'}"
        grpc_server = grpc.aio.server()
        for each in services:
            if isinstance(each, ScriptedAgentService):
                add_AgentServiceServicer_to_server(each, grpc_server)
            else:
                add_RolloutServiceServicer_to_server(each, grpc_server)
        grpc_server.add_insecure_port(address)
        await grpc_server.start()
        try:
            yield address
        finally:
            await grpc_server.stop(None)


@contextlib.asynccontextmanager
async def model_gateway(**settings: Any) -> AsyncIterator[ModelGateway]:
    """Run a gateway in front of a scripted server."""
    server, rollouts = ScriptedAgentService(), ScriptedServer()  # type: ignore[abstract]
    async with (
        agent_server(server, rollouts) as address,
        open_channel(address) as channel,
        listening(create_app(channel, GatewaySettings(**settings))) as (host, port),
        http_client(f"http://{host}:{port}") as client,
    ):
        yield ModelGateway(server, rollouts, client, host, port, address)


def frames_of(content: str) -> list[tuple[str, Any]]:
    """The events of a stream: their names and data. Comments are left out."""
    found = []
    for block in content.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
        if "data" in fields:
            data = fields["data"]
            found.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return found
