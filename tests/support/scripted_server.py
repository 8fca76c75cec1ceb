"""A real gRPC server with scripted responses, which records its requests."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message as ProtoMessage
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from osmosis.rollout.v1 import event_pb2, message_pb2, outcome_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceServicer
from rollout_server.edge.wire.function_tool import function_tool_json

UID = "0192-scripted_Uid"


@dataclass(frozen=True)
class Refusal:
    """How a call fails: with the contract's error details if `rich`, else with a bare status."""

    code: grpc.StatusCode
    text: str = "refused for a reason"
    details: tuple[ProtoMessage, ...] = ()
    rich: bool = True

    async def abort(self, context: Any) -> None:
        if not self.rich:
            await context.abort(self.code, self.text)
        await context.abort(self.code, self.text, trailing_metadata=(("grpc-status-details-bin", self.packed()),))

    def packed(self) -> bytes:
        status = Status(code=self.code.value[0], message=self.text)
        for detail in (*self.details, ErrorInfo(reason="TEST", domain="rollout.osmosis")):
            packed = AnyMessage()
            packed.Pack(detail)
            status.details.append(packed)
        return bytes(status.SerializeToString())


def json_messages(texts: Iterable[str]) -> list[message_pb2.Message]:
    return [message_pb2.Message(json=text) for text in texts]


def stopped(*texts: str) -> outcome_pb2.Outcome:
    return outcome_pb2.Outcome(stop=outcome_pb2.Stop(reason="stop"), messages=json_messages(texts))


@dataclass
class ScriptedServer(RolloutServiceServicer):
    """Return `outcome` once `go` is set. An rpc that is named in `refusals` fails."""

    outcome: outcome_pb2.Outcome = field(default_factory=lambda: stopped('{"role":"assistant","content":"Hi."}'))
    events: list[event_pb2.RolloutEvent] = field(default_factory=list)
    tools: list[message_pb2.Tool] = field(default_factory=list)
    refusals: dict[str, Refusal] = field(default_factory=dict)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    finishes: bool = True
    accepted: pb.StartRolloutResponse = field(default_factory=pb.StartRolloutResponse)
    info: pb.GetServerInfoResponse = field(
        default_factory=lambda: pb.GetServerInfoResponse(running=3, queued=2, finished=7, default_agent="calculator")
    )

    started: asyncio.Event = field(default_factory=asyncio.Event)
    detached: asyncio.Event = field(default_factory=asyncio.Event)
    requests: list[pb.RunRolloutRequest] = field(default_factory=list)
    starts: list[pb.StartRolloutRequest] = field(default_factory=list)
    watches: list[pb.WatchRolloutRequest] = field(default_factory=list)
    agents_asked: list[str] = field(default_factory=list)
    acknowledged: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.go.set()

    async def _enter(self, rpc: str, context: Any) -> None:
        self.calls.append(rpc)
        self.metadata[rpc] = dict(context.invocation_metadata())
        if rpc in self.refusals:
            await self.refusals[rpc].abort(context)

    async def RunRollout(self, request: Any, context: Any) -> AsyncIterator[pb.RunRolloutResponse]:
        self.requests.append(request)
        await self._enter("RunRollout", context)
        yield pb.RunRolloutResponse(started=pb.StartRolloutResponse(rollout=pb.Rollout(uid=UID)))
        self.started.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.detached.set()
            raise
        if self.finishes:
            finished = event_pb2.RolloutEvent(sequence=9, finished=event_pb2.Finished(outcome=self.outcome))
            yield pb.RunRolloutResponse(event=finished)

    async def StartRollout(self, request: Any, context: Any) -> pb.StartRolloutResponse:
        """Return `accepted`, with missing fields filled in."""
        self.starts.append(request)
        await self._enter("StartRollout", context)
        self.started.set()
        found = pb.Rollout(uid=UID, spec=request.spec, state=pb.ROLLOUT_STATE_QUEUED)
        found.MergeFrom(self.accepted.rollout)
        functions = map(function_tool_json, self.tools) if request.include_function_tools else ()
        return pb.StartRolloutResponse(
            rollout=found, attached=self.accepted.attached, tools=self.tools, function_tools_json=functions
        )

    async def WatchRollout(self, request: Any, context: Any) -> AsyncIterator[pb.WatchRolloutResponse]:
        self.watches.append(request)
        await self._enter("WatchRollout", context)
        for event in self.events:
            yield pb.WatchRolloutResponse(event=event)

    async def AcknowledgeOutcome(self, request: Any, context: Any) -> pb.AcknowledgeOutcomeResponse:
        await self._enter("AcknowledgeOutcome", context)
        self.acknowledged.append(request.uid)
        return pb.AcknowledgeOutcomeResponse()

    async def ListTools(self, request: Any, context: Any) -> pb.ListToolsResponse:
        self.agents_asked.append(request.agent)
        await self._enter("ListTools", context)
        return pb.ListToolsResponse(tools=self.tools)

    async def ListAgents(self, request: Any, context: Any) -> pb.ListAgentsResponse:
        await self._enter("ListAgents", context)
        agents = [pb.Agent(name="another"), pb.Agent(name="calculator", default=True)]
        return pb.ListAgentsResponse(agents=agents)

    async def GetServerInfo(self, request: Any, context: Any) -> pb.GetServerInfoResponse:
        await self._enter("GetServerInfo", context)
        return self.info
