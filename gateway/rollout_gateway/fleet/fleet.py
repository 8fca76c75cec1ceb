"""Several rollout servers behind one gateway, called like one.

A rollout lives on one server. Which one, a start finds by rendezvous hashing over what duplicates have in common, so that
duplicates meet, also through another gateway; `routing` has the rules.
"""

# ruff: noqa: N802 - methods are named as those of gRPC's stubs are.

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import grpc
from google.protobuf.message import Message
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub

from rollout_gateway.calls import CallMetadata
from rollout_gateway.channel import ServerChannel
from rollout_gateway.fleet.members import CallContext, Member
from rollout_gateway.fleet.merging import merged_page, summed, united
from rollout_gateway.fleet.routing import Routing

if TYPE_CHECKING:
    from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceAsyncStub

# Health checks wait for it, and a server that hangs must not make the others look ill.
_SUMMARY_SECONDS: Final = 3.0
_NOBODY: Final = "nobody can answer"
_Answer = TypeVar("_Answer")
#: The first item, None where there is none, and the others.
_Stream = tuple[Any, AsyncIterator[Any]]


def stub_of(channels: Sequence[grpc.aio.Channel]) -> "RolloutServiceAsyncStub":
    """What routes call: the stub of the only server, or a fleet of several, whose channels `open_channel` made."""
    if len(channels) == 1:
        return RolloutServiceStub(channels[0])
    # It has the methods and the results that routes use.
    return cast("RolloutServiceAsyncStub", Fleet(channels))


class Relay:
    """What routes use of a call with a stream of answers: its items, and `cancel`. Raises grpc.aio.AioRpcError as a call does.

    `start` finds a server and has the relay `begin` the call there.
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
        """Makes a call the one that `cancel` ends; its first item, None where there is none, and the others."""
        self._call = call
        if self._cancelled:
            call.cancel()
        items = aiter(call)
        return await anext(items, None), items

    def cancel(self) -> bool:
        """Ends the call under way, and those that would follow. Does nothing once the stream has ended."""
        self._cancelled = True
        return self._call is not None and self._call.cancel()


def _rpc(method: Callable[["Fleet", Any, CallContext], _Answer]) -> Callable[..., _Answer]:
    """Gives a method the parameters of a stub's."""

    @wraps(method)
    def call(self: "Fleet", request: Message, *, metadata: CallMetadata = (), timeout: float | None = None) -> _Answer:
        ends = None if timeout is None else time.monotonic() + timeout
        return method(self, request, CallContext(metadata or (), ends))

    return call


def _owned(rpc: str) -> Callable[..., Awaitable[Any]]:
    """A method that calls an rpc of one answer on the server that has the request's rollout."""

    async def call(self: "Fleet", request: Any, context: CallContext) -> Any:
        return await (await self._routing.owner(request.uid, context)).call(rpc, request, context)

    return _rpc(call)


class Fleet:
    """The rpcs of RolloutService over several servers. Raises ValueError for none, and for one that is named twice.

    They raise grpc.aio.AioRpcError with the statuses of the contract. UNAVAILABLE also means that a server that counts for the
    answer cannot be reached. `timeout` is in seconds, for all that a call does.
    """

    GetRollout = _owned("GetRollout")
    WaitRollout = _owned("WaitRollout")
    AcknowledgeOutcome = _owned("AcknowledgeOutcome")

    def __init__(self, channels: Sequence[grpc.aio.Channel]) -> None:
        members = [Member(channel) for channel in channels if isinstance(channel, ServerChannel)]
        if not members or len({member.address for member in members}) != len(channels):
            raise ValueError("several servers need channels that open_channel made, to different addresses")
        self._routing = Routing(members)

    @_rpc
    async def StartRollout(self, request: pb.StartRolloutRequest, context: CallContext) -> pb.StartRolloutResponse:
        """Has one of the servers accept a rollout, or find it."""
        member, answer = await self._routing.offer(
            request, context, lambda each: each.call("StartRollout", request, context)
        )
        self._routing.remember(answer.rollout.uid, member)
        return cast(pb.StartRolloutResponse, answer)

    @_rpc
    def RunRollout(self, request: pb.RunRolloutRequest, context: CallContext) -> Relay:
        """Has one of the servers accept a rollout, or find it, and streams its events."""

        async def start(relay: Relay) -> _Stream:
            member, (first, others) = await self._routing.offer(
                request.start, context, lambda each: relay.begin(each.stub.RunRollout(request, **context.options()))
            )
            if first is not None:
                # It says that the rollout was taken.
                self._routing.remember(first.started.rollout.uid, member)
            return first, others

        return Relay(start)

    @_rpc
    def WatchRollout(self, request: pb.WatchRolloutRequest, context: CallContext) -> Relay:
        """Streams a rollout's events."""

        async def start(relay: Relay) -> _Stream:
            member = await self._routing.owner(request.uid, context)
            return await relay.begin(member.stub.WatchRollout(request, **context.options()))

        return Relay(start)

    @_rpc
    async def ListRollouts(self, request: pb.ListRolloutsRequest, context: CallContext) -> pb.ListRolloutsResponse:
        """Reads a page of the rollouts of all servers."""
        return await merged_page(self._routing, request, context)

    @_rpc
    async def CancelRollouts(
        self, request: pb.CancelRolloutsRequest, context: CallContext
    ) -> pb.CancelRolloutsResponse:
        """Asks rollouts to end, wherever they are. Nothing is asked to end if one of the uids is nowhere.

        If a server fails, others may have done what was asked; as for one server, the call can be repeated freely.
        """
        parts = dict.fromkeys(self._routing.members, request)
        if uids := list(dict.fromkeys(request.selection.uids)):
            parts = {}
            for member, theirs in (await self._routing.owners(uids, context)).items():
                parts[member] = pb.CancelRolloutsRequest()
                parts[member].CopyFrom(request)
                parts[member].selection.uids[:] = theirs
        consequence = "what they have was not asked to end"
        found = await self._routing.call_all("CancelRollouts", parts, context, consequence)
        return pb.CancelRolloutsResponse(uids=[uid for answer in found.values() for uid in answer.uids])

    @_rpc
    async def ListTools(self, request: pb.ListToolsRequest, context: CallContext) -> Any:
        """The tools of an agent, from the server that answers first and has it."""
        consequence = "they may know what was asked for"
        return (await self._routing.soonest("ListTools", request, context, consequence))[1]

    @_rpc
    async def ListAgents(self, request: pb.ListAgentsRequest, context: CallContext) -> pb.ListAgentsResponse:
        """The agents of the servers that can be reached, each name once."""
        return united(await self._some("ListAgents", request, context))

    @_rpc
    async def AnyAgents(self, request: pb.ListAgentsRequest, context: CallContext) -> Any:
        """The agents of the server that answers first: one that hangs delays nobody."""
        return (await self._routing.soonest("ListAgents", request, context, _NOBODY))[1]

    @_rpc
    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: CallContext) -> pb.GetServerInfoResponse:
        """What the servers that can be reached are and can do together."""
        return summed(await self._some("GetServerInfo", request, context))

    async def _some(self, rpc: str, request: Message, context: CallContext) -> Sequence[Any]:
        """What the servers answer that can be reached. Raises AioRpcError if there are none."""
        requests = dict.fromkeys(self._routing.members, request)
        return [*(await self._routing.call_all(rpc, requests, context, _NOBODY, _SUMMARY_SECONDS)).values()]
