"""Several rollout servers behind one gateway, with the interface of a single server's stub.

A rollout lives on one server. A start chooses it by rendezvous hashing over the completion URL and the request id. Duplicates
of a start therefore reach the same server, also through another gateway. `routing` has the rules.
"""

# ruff: noqa: N802 - methods have the names of gRPC's stubs.

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import grpc
from google.protobuf.message import Message
from osmosis.rollout.v1 import rollout_service_pb2 as pb

from rollout_gateway.calls import CallMetadata
from rollout_gateway.channel import ServerChannel
from rollout_gateway.fleet.members import CallContext, Member, ServerStub
from rollout_gateway.fleet.merging import merged_page, summed, united
from rollout_gateway.fleet.routing import Routing

if TYPE_CHECKING:
    from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceAsyncStub

# Health checks wait at most this long, so one hanging server does not make the fleet look unhealthy.
_SUMMARY_SECONDS: Final = 3.0
_NOBODY: Final = "no server can respond"
_Answer = TypeVar("_Answer")
#: The first item (None if the stream is empty) and the others.
_Stream = tuple[Any, AsyncIterator[Any]]


def stub_of(servers: "grpc.aio.Channel | Sequence[grpc.aio.Channel] | Fleet") -> "RolloutServiceAsyncStub":
    """Return what routes call: the stub of a single server, or a fleet of several, whose channels `open_channel` made."""
    channels = [servers] if isinstance(servers, grpc.aio.Channel) else servers
    if not isinstance(channels, Fleet) and len(channels) == 1:
        return cast("RolloutServiceAsyncStub", ServerStub(channels[0]))
    # Fleet has the methods and results that the routes use.
    return cast("RolloutServiceAsyncStub", channels if isinstance(channels, Fleet) else Fleet(channels))


class Relay:
    """Streaming call whose server is not chosen yet: an iterator with `cancel`. Raises grpc.aio.AioRpcError like a call.

    `start` chooses a server, calls it, and passes the call to `begin`.
    """

    def __init__(self, start: Callable[["Relay"], Awaitable[_Stream]]) -> None:
        self._start = start
        self._call: grpc.aio.UnaryStreamCall[Any, Any] | None = None
        self._cancelled = False

    async def __aiter__(self) -> AsyncIterator[Any]:
        first, others = await self._start(self)
        if first is not None:
            yield first
            async for item in others:
                yield item

    async def begin(self, call: "grpc.aio.UnaryStreamCall[Any, Any]") -> _Stream:
        """Make `call` the one that `cancel` cancels. Returns its first item (None if there is none) and the others."""
        self._call = call
        if self._cancelled:
            call.cancel()
        items = aiter(call)
        return await anext(items, None), items

    def cancel(self) -> bool:
        """Cancel the current call and any later one. Has no effect once the stream has ended."""
        self._cancelled = True
        return self._call is not None and self._call.cancel()


def _rpc(method: Callable[["Fleet", Any, CallContext], _Answer]) -> Callable[..., _Answer]:
    """Give a method the signature of a stub's method."""

    @wraps(method)
    def call(self: "Fleet", request: Message, *, metadata: CallMetadata = (), timeout: float | None = None) -> _Answer:
        ends = None if timeout is None else time.monotonic() + timeout
        return method(self, request, CallContext(metadata or (), ends))

    return call


def _owned(rpc: str) -> Callable[..., Awaitable[Any]]:
    """Return a method that calls a unary rpc on the server that has the request's rollout or group."""

    async def call(self: "Fleet", request: Any, context: CallContext) -> Any:
        return await (await self.routing.owner_of(request, context)).call(rpc, request, context)

    return _rpc(call)


def _followed(rpc: str) -> Callable[..., Relay]:
    """Return a method that streams from the server that has the request's rollout or group."""

    def call(self: "Fleet", request: Any, context: CallContext) -> Relay:
        async def start(relay: Relay) -> _Stream:
            member = await self.routing.owner_of(request, context)
            return await relay.begin(getattr(member.stub, rpc)(request, **context.options()))

        return Relay(start)

    return _rpc(call)


def _offered(rpc: str, uid_of: Callable[[Any], str]) -> Callable[..., Awaitable[Any]]:
    """Return a method that starts a rollout or a group on one of the servers, or finds it there."""

    async def call(self: "Fleet", request: Any, context: CallContext) -> Any:
        member, response = await self.routing.offer(request, context, lambda each: each.call(rpc, request, context))
        self.routing.remember(uid_of(response), member)
        return response

    return _rpc(call)


class Fleet:
    """The rpcs of both services over several servers. Raises ValueError for no servers, and for one that is named twice.

    The rpcs raise grpc.aio.AioRpcError with the statuses of the contract. UNAVAILABLE also means that a server that the
    response depends on cannot be reached. `timeout` is in seconds and covers everything that one rpc does.

    Args:
        channels: one for each server. The name of a server in the order of a start is the channel's address.
        failover: offer a start to another server if its first one is unreachable. Without it, such a start is UNAVAILABLE, so a
            server that comes back has all rollouts of its request ids.
    """

    StartRollout = _offered("StartRollout", lambda response: response.rollout.uid)
    StartGroup = _offered("StartGroup", lambda response: response.group.members[0].uid)
    WatchRollout = _followed("WatchRollout")
    WatchGroup = _followed("WatchGroup")
    GetRollout = _owned("GetRollout")
    GetGroup = _owned("GetGroup")
    DecodeTokens = _owned("DecodeTokens")
    WaitRollout = _owned("WaitRollout")
    AcknowledgeOutcome = _owned("AcknowledgeOutcome")
    CallModel = _followed("CallModel")
    ConfirmCompletion = _owned("ConfirmCompletion")
    CountTokens = _owned("CountTokens")
    GetModelAccess = _owned("GetModelAccess")
    FinishRollout = _owned("FinishRollout")
    ListRolloutTools = _owned("ListRolloutTools")
    CallRolloutTool = _owned("CallRolloutTool")

    def __init__(self, channels: Sequence[grpc.aio.Channel], *, failover: bool = True) -> None:
        members = [Member(channel) for channel in channels if isinstance(channel, ServerChannel)]
        if not members or len({member.address for member in members}) != len(channels):
            raise ValueError("several servers need channels that open_channel made, to different addresses")
        self.routing = Routing(members, failover=failover)

    @_rpc
    def RunRollout(self, request: pb.RunRolloutRequest, context: CallContext) -> Relay:
        """Start a rollout on one of the servers, or find it there, and stream its events."""

        async def start(relay: Relay) -> _Stream:
            member, (first, others) = await self.routing.offer(
                request.start, context, lambda each: relay.begin(each.stub.RunRollout(request, **context.options()))
            )
            if first is not None:
                # The first item confirms that the server accepted the rollout.
                self.routing.remember(first.started.rollout.uid, member)
            return first, others

        return Relay(start)

    @_rpc
    async def ListRollouts(self, request: pb.ListRolloutsRequest, context: CallContext) -> pb.ListRolloutsResponse:
        """Return a page of the rollouts of all servers."""
        return await merged_page(self.routing, request, context)

    @_rpc
    async def CancelRollouts(
        self, request: pb.CancelRolloutsRequest, context: CallContext
    ) -> pb.CancelRolloutsResponse:
        """Cancel rollouts on all servers. If one of the uids does not exist, nothing is cancelled.

        If a server fails, the others may have cancelled their rollouts already. As with one server, the call can be repeated.
        """
        consequence = "their rollouts were not cancelled"
        return pb.CancelRolloutsResponse(uids=await self._selected("CancelRollouts", request, context, consequence))

    @_rpc
    async def RedeliverOutcomes(
        self, request: pb.RedeliverOutcomesRequest, context: CallContext
    ) -> pb.RedeliverOutcomesResponse:
        """Send outcomes of all servers again. If one of the uids does not exist, or a server fails: as in CancelRollouts."""
        consequence = "their outcomes were not sent again"
        return pb.RedeliverOutcomesResponse(
            uids=await self._selected("RedeliverOutcomes", request, context, consequence)
        )

    @_rpc
    async def SetPolicy(self, request: pb.SetPolicyRequest, context: CallContext) -> pb.SetPolicyResponse:
        """Announce a policy to all servers. If one fails, the others know the policy already; the call can be repeated."""
        requests = dict.fromkeys(self.routing.members, request)
        found = await self.routing.call_all("SetPolicy", requests, context, "they do not know the policy")
        return pb.SetPolicyResponse(cancelled_uids=[uid for each in found.values() for uid in each.cancelled_uids])

    @_rpc
    async def ListTools(self, request: pb.ListToolsRequest, context: CallContext) -> Any:
        """Return the tools of an agent, from the first server that responds and has it."""
        consequence = "one of them may have the agent"
        return (await self.routing.soonest("ListTools", request, context, consequence))[1]

    @_rpc
    async def ListAgents(self, request: pb.ListAgentsRequest, context: CallContext) -> pb.ListAgentsResponse:
        """Return the agents of all reachable servers, each name once."""
        return united(await self._some("ListAgents", request, context))

    @_rpc
    async def AnyAgents(self, request: pb.ListAgentsRequest, context: CallContext) -> Any:
        """Return the agents of the first server that responds, so that a hanging server delays no request."""
        return (await self.routing.soonest("ListAgents", request, context, _NOBODY))[1]

    @_rpc
    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: CallContext) -> pb.GetServerInfoResponse:
        """Return the combined server info of all reachable servers."""
        return summed(await self._some("GetServerInfo", request, context))

    async def _selected(self, rpc: str, request: Any, context: CallContext, consequence: str) -> Sequence[str]:
        """Call an rpc with a selection on all servers that it concerns, and return the uids of their responses."""
        parts = dict.fromkeys(self.routing.members, request)
        if uids := list(dict.fromkeys(request.selection.uids)):
            parts = {}
            for member, owned in (await self.routing.owners(uids, context)).items():
                parts[member] = type(request)()
                parts[member].CopyFrom(request)
                parts[member].selection.uids[:] = owned
        found = await self.routing.call_all(rpc, parts, context, consequence)
        return [uid for response in found.values() for uid in response.uids]

    async def _some(self, rpc: str, request: Message, context: CallContext) -> Sequence[Any]:
        """Return the responses of all reachable servers. Raises AioRpcError if there are none."""
        requests = dict.fromkeys(self.routing.members, request)
        return [*(await self.routing.call_all(rpc, requests, context, _NOBODY, _SUMMARY_SECONDS)).values()]
