"""Tool servers: a ToolService with a counter for each rollout, one that returns any bytes, and a connector to call them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from osmosis.rollout.v1 import message_pb2, tool_service_pb2_grpc
from osmosis.rollout.v1 import tool_service_pb2 as pb
from rollout_server.core.spec import Dialect, Target
from rollout_server.edge.grpc_channels import Channels
from rollout_server.edge.rpc.tls import ClientTls
from rollout_server.edge.targets.resolver import CheckedLookup
from rollout_server.edge.targets.rules import TargetRules
from rollout_server.edge.toolsets.tool_service import ToolServiceConnector, ToolServiceTimes
from rollout_server.runtime.tools.toolset import RequestedToolset, ToolsetCall

from tests.support.grpc_trainer import Fault, abort

Context = Any
Servicer = tool_service_pb2_grpc.ToolServiceServicer
QUICK = ToolServiceTimes(first=0.005, most=0.02)
LONG_METADATA = json.dumps({"text": "x" * 200})
"""Metadata of a rollout that make each request longer than what HTTP/2 sends by itself, as `TcpProxy` needs it."""
_SCHEMA = '{"type": "object", "properties": {"amount": {"type": "integer"}}}'


def response(text: str) -> pb.CallToolResponse:
    """A result of one text."""
    return pb.CallToolResponse(output=pb.ToolOutput(parts=[message_pb2.ContentPart(text=text)]))


@dataclass
class CounterService(Servicer):
    """Add to a counter of the rollout, run each call key once, and record all calls.

    Args:
        faults: the first calls of either rpc end with these, before anything runs.
        lost_answers: how many answers of each call key are lost after its run: the call ends with UNAVAILABLE.
        replies: what tools beside "add" return, by name, in order.
    """

    faults: list[Fault] = field(default_factory=list)
    lost_answers: int = 0
    replies: dict[str, list[pb.CallToolResponse]] = field(default_factory=dict)
    idempotent: tuple[str, ...] = ()
    metadata: list[dict[str, str]] = field(default_factory=list)
    listings: list[pb.DescribeToolsRequest] = field(default_factory=list)
    calls: list[pb.CallToolRequest] = field(default_factory=list)
    runs: Counter[str] = field(default_factory=Counter)
    counters: Counter[str] = field(default_factory=Counter)
    began: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    _results: dict[str, pb.CallToolResponse] = field(default_factory=dict)
    _lost: Counter[str] = field(default_factory=Counter)

    async def DescribeTools(self, request: pb.DescribeToolsRequest, context: Context) -> pb.DescribeToolsResponse:
        self.listings.append(request)
        await self._arrive(context)
        names = ["add", *self.replies]
        tools = [message_pb2.Tool(name=name, description="?", parameters_json_schema=_SCHEMA) for name in names]
        return pb.DescribeToolsResponse(tools=tools, idempotent_tools=self.idempotent)

    async def CallTool(self, request: pb.CallToolRequest, context: Context) -> pb.CallToolResponse:
        self.calls.append(request)
        await self._arrive(context)
        key = request.call_key
        if key not in self._results:
            self.runs[key] += 1
            self._results[key] = await self._run(request)
        if self._lost[key] < self.lost_answers:
            self._lost[key] += 1
            await abort(context, Fault(grpc.StatusCode.UNAVAILABLE, "the answer is lost"))
        return self._results[key]

    async def _arrive(self, context: Context) -> None:
        self.metadata.append(dict(context.invocation_metadata()))
        if self.faults:
            await abort(context, self.faults.pop(0))

    async def _run(self, request: pb.CallToolRequest) -> pb.CallToolResponse:
        if request.call.name == "hang":
            self.began.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        if request.call.name != "add":
            return self.replies[request.call.name].pop(0)
        self.counters[request.uid] += json.loads(request.call.arguments_json)["amount"]
        return response(str(self.counters[request.uid]))


class RawService(grpc.GenericRpcHandler):
    """Return these bytes to every call."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def service(self, handler_call_details: object) -> Any:
        """The handler of every method."""
        return grpc.unary_unary_rpc_method_handler(self._answer)

    async def _answer(self, request: bytes, context: Context) -> bytes:
        return self.data


@asynccontextmanager
async def serving(
    service: Servicer | RawService, port: int = 0, credentials: grpc.ServerCredentials | None = None
) -> AsyncIterator[str]:
    """Yield the URL of a server, which is killed at the end: calls that run are cut off."""
    # Without SO_REUSEPORT, a second server on the port would be an error, and not a share of the connections.
    options = (("grpc.so_reuseport", 0), ("grpc.max_send_message_length", -1))
    server = grpc.aio.server(options=options)
    if isinstance(service, RawService):
        server.add_generic_rpc_handlers((service,))
    else:
        tool_service_pb2_grpc.add_ToolServiceServicer_to_server(service, server)
    address = f"127.0.0.1:{port}"
    port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    await server.start()
    try:
        yield f"{'grpcs' if credentials else 'grpc'}://127.0.0.1:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def connector(
    times: ToolServiceTimes = QUICK, rules: str = "", ca: Path | None = None
) -> AsyncIterator[ToolServiceConnector]:
    """A connector with channels of its own, which may call what the rules allow, and trusts an authority."""
    lookup = CheckedLookup(TargetRules.parse(rules))
    channels = Channels(lookup, ClientTls(ca))
    try:
        yield ToolServiceConnector(channels, times)
    finally:
        await channels.close()
        await lookup.close()


def source(url: str) -> RequestedToolset:
    """The toolset of a request that names this URL."""
    return RequestedToolset(Target(url, Dialect.GRPC))


def call(name: str, key: str, uid: str = "u1", **arguments: Any) -> ToolsetCall:
    """A call of a tool."""
    return ToolsetCall(name, arguments, key, uid, call_id=f"model-{key}")
