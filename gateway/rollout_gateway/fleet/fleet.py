"""Several rollout servers behind one gateway, called like one.

A rollout lives on one server. Which one, a start finds by rendezvous hashing over what duplicates have in common, so that
duplicates meet, also through another gateway; `routing` has the rules.
"""

# ruff: noqa: N802 - methods are named as those of gRPC's stubs are.

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import grpc
from google.protobuf.message import Message
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub

from rollout_gateway.calls import CallMetadata
from rollout_gateway.channel import ServerChannel
from rollout_gateway.fleet.errors import combined
from rollout_gateway.fleet.members import CallContext, Member
from rollout_gateway.fleet.merging import merged_page, summed, united
from rollout_gateway.fleet.routing import Routing, call_all

if TYPE_CHECKING:
    from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceAsyncStub

# Health checks wait for it, and a server that hangs must not make the others look ill.
_SUMMARY_SECONDS: Final = 3.0
_NOBODY: Final = "nobody can answer"
_Answer = TypeVar("_Answer")
_SomeCall = TypeVar("_SomeCall", bound="grpc.aio.UnaryStreamCall[Any, Any]")


def stub_of(channels: Sequence[grpc.aio.Channel]) -> "RolloutServiceAsyncStub":
    """What routes call: the stub of the only server, or a fleet of several, whose channels `open_channel` made."""
    if len(channels) == 1:
        return RolloutServiceStub(channels[0])
    # It has the methods and the results that routes use.
    return cast("RolloutServiceAsyncStub", Fleet(channels))


class Relay:
    """What routes use of a call with a stream of answers: its items, and `cancel`.

    `items` is given the relay and begins calls through `begin`. Raises grpc.aio.AioRpcError as a call does.
    """

    def __init__(self, items: Callable[["Relay"], AsyncIterator[Any]]) -> None:
        self._items = items(self)
        self._call: grpc.aio.UnaryStreamCall[Any, Any] | None = None
        self._cancelled = False

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._items

    def begin(self, call: _SomeCall) -> _SomeCall:
        """Makes a call the one that `cancel` ends."""
        self._call = call
        if self._cancelled:
            call.cancel()
        return call

    def cancel(self) -> bool:
        """Ends the call under way, and those that would follow. Does nothing once the stream has ended."""
        self._cancelled = True
        return self._call is not None and self._call.cancel()


def _rpc(method: Callable[["Fleet", Any, CallContext], _Answer]) -> Callable[..., _Answer]:
    """Gives a method the parameters of a stub's."""

    @wraps(method)
    def call(self: "Fleet", request: Message, *, metadata: CallMetadata = (), timeout: float | None = None) -> _Answer:
        return method(self, request, CallContext.of(metadata, timeout))

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

        async def start_on(member: Member) -> pb.StartRolloutResponse:
            answer = await member.stub.StartRollout(request, **context.options())
            self._routing.remember(answer.rollout.uid, member)
            return answer

        return await self._routing.offer(request, context, start_on)

    @_rpc
    def RunRollout(self, request: pb.RunRolloutRequest, context: CallContext) -> Relay:
        """Has one of the servers accept a rollout, or find it, and streams its events."""

        async def items(relay: Relay) -> AsyncIterator[pb.RunRolloutResponse]:
            async def start_on(
                member: Member,
            ) -> tuple[list[pb.RunRolloutResponse], AsyncIterator[pb.RunRolloutResponse]]:
                following = aiter(relay.begin(member.stub.RunRollout(request, **context.options())))
                async for first in following:
                    # It says that the rollout was taken.
                    self._routing.remember(first.started.rollout.uid, member)
                    return [first], following
                return [], following

            begun, following = await self._routing.offer(request.start, context, start_on)
            for item in begun:
                yield item
            async for item in following:
                yield item

        return Relay(items)

    @_rpc
    def WatchRollout(self, request: pb.WatchRolloutRequest, context: CallContext) -> Relay:
        """Streams a rollout's events."""

        async def items(relay: Relay) -> AsyncIterator[pb.WatchRolloutResponse]:
            member = await self._routing.owner(request.uid, context)
            async for item in relay.begin(member.stub.WatchRollout(request, **context.options())):
                yield item

        return Relay(items)

    @_rpc
    async def ListRollouts(self, request: pb.ListRolloutsRequest, context: CallContext) -> pb.ListRolloutsResponse:
        """Reads a page of the rollouts of all servers."""
        # In an order that does not depend on who listed the servers, so that a page token fits any gateway before them.
        members = sorted(self._routing.members, key=lambda member: member.address)
        return await merged_page(members, request, context)

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
        found, failures = await call_all("CancelRollouts", parts, context)
        if failures:
            raise self._failure(failures, context, "what they have was not asked to end")
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
        found, failures = await call_all(rpc, requests, context, _SUMMARY_SECONDS)
        if not found:
            raise self._failure(failures, context, _NOBODY)
        return list(found.values())

    def _failure(
        self, failures: Sequence[grpc.aio.AioRpcError], context: CallContext, consequence: str
    ) -> grpc.aio.AioRpcError:
        return combined(failures, len(self._routing.members), consequence, over=context.over)
