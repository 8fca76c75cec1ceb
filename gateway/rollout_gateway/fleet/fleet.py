"""Several rollout servers behind one gateway, called like one.

A rollout lives on one server. Which one, a start finds by rendezvous hashing over what duplicates have in common, so that
duplicates meet, also through another gateway; `whereabouts` has the rules.
"""

# ruff: noqa: N802, ASYNC109 - methods are named, and take timeouts, as those of gRPC's stubs do.

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar, cast

import grpc
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub

from rollout_gateway.calls import CallMetadata
from rollout_gateway.channel import ServerChannel
from rollout_gateway.fleet.errors import combined
from rollout_gateway.fleet.members import Member, StartConstraints
from rollout_gateway.fleet.merging import merged_page
from rollout_gateway.fleet.relay import Relay, chained
from rollout_gateway.fleet.routing import FleetResponses, Routing
from rollout_gateway.fleet.summary import summed, united

if TYPE_CHECKING:
    from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceAsyncStub

# Health checks wait for it, and a server that hangs must not make the others look ill.
_SUMMARY_SECONDS: Final = 3.0
_NOBODY: Final = "nobody can answer"
_T = TypeVar("_T")


def stub_of(channels: Sequence[grpc.aio.Channel]) -> "RolloutServiceAsyncStub":
    """What routes call: the stub of the only server, or a fleet of several, whose channels `open_channel` made."""
    if len(channels) == 1:
        return RolloutServiceStub(channels[0])
    # It has the methods and the results that routes use.
    return cast("RolloutServiceAsyncStub", Fleet(channels))


class Fleet:
    """The rpcs of RolloutService over several servers. Raises ValueError for none, and for one that is named twice.

    They raise grpc.aio.AioRpcError with the statuses of the contract. UNAVAILABLE also means that a server that counts for the
    answer cannot be reached. `timeout` is in seconds, for all that a call does.
    """

    def __init__(self, channels: Sequence[grpc.aio.Channel]) -> None:
        members = [Member(channel) for channel in channels if isinstance(channel, ServerChannel)]
        if not members or len({member.address for member in members}) != len(channels):
            raise ValueError("several servers need channels that open_channel made, to different addresses")
        self._places = Routing(members)

    async def StartRollout(
        self, request: pb.StartRolloutRequest, *, metadata: CallMetadata = (), timeout: float | None = None
    ) -> pb.StartRolloutResponse:
        """Has one of the servers accept a rollout, or find it."""
        terms = StartConstraints.of(metadata, timeout)

        async def ask(member: Member) -> pb.StartRolloutResponse:
            answer = await member.stub.StartRollout(request, metadata=terms.metadata, timeout=terms.left)
            self._places.note(answer.rollout.uid, member)
            return answer

        return await self._places.offer(request, terms, ask)

    def RunRollout(
        self, request: pb.RunRolloutRequest, *, metadata: CallMetadata = (), timeout: float | None = None
    ) -> Relay[pb.RunRolloutResponse]:
        """Has one of the servers accept a rollout, or find it, and streams its events."""
        terms = StartConstraints.of(metadata, timeout)

        async def find(relay: Relay[pb.RunRolloutResponse]) -> AsyncIterator[pb.RunRolloutResponse]:
            async def ask(member: Member) -> AsyncIterator[pb.RunRolloutResponse]:
                call = relay.begin(member.stub.RunRollout(request, metadata=terms.metadata, timeout=terms.left))
                items = aiter(call)
                async for first in items:
                    # It says that the rollout was taken.
                    self._places.note(first.started.rollout.uid, member)
                    return chained(first, items)
                return items

            return await self._places.offer(request.start, terms, ask)

        return Relay(find)

    def WatchRollout(
        self, request: pb.WatchRolloutRequest, *, metadata: CallMetadata = (), timeout: float | None = None
    ) -> Relay[pb.WatchRolloutResponse]:
        """Streams a rollout's events."""
        terms = StartConstraints.of(metadata, timeout)

        async def find(relay: Relay[pb.WatchRolloutResponse]) -> AsyncIterator[pb.WatchRolloutResponse]:
            member = await self._places.owner(request.uid, terms)
            return aiter(relay.begin(member.stub.WatchRollout(request, metadata=terms.metadata, timeout=terms.left)))

        return Relay(find)

    async def WaitRollout(
        self, request: pb.WaitRolloutRequest, *, metadata: CallMetadata = (), timeout: float | None = None
    ) -> pb.WaitRolloutResponse:
        """Waits for a rollout's end."""
        terms = StartConstraints.of(metadata, timeout)
        member = await self._places.owner(request.uid, terms)
        return await member.stub.WaitRollout(request, metadata=terms.metadata, timeout=terms.left)

    async def GetRollout(
        self, request: pb.GetRolloutRequest, *, metadata: CallMetadata = (), timeout: float | None = None
    ) -> pb.GetRolloutResponse:
        """Reads a rollout."""
        terms = StartConstraints.of(metadata, timeout)
        member = await self._places.owner(request.uid, terms)
        return await member.stub.GetRollout(request, metadata=terms.metadata, timeout=terms.left)

    async def AcknowledgeOutcome(
        self, request: pb.AcknowledgeOutcomeRequest, *, metadata: CallMetadata = (), timeout: float | None = None
    ) -> pb.AcknowledgeOutcomeResponse:
        """Takes note that an outcome was received."""
        terms = StartConstraints.of(metadata, timeout)
        member = await self._places.owner(request.uid, terms)
        return await member.stub.AcknowledgeOutcome(request, metadata=terms.metadata, timeout=terms.left)

    async def ListRollouts(
        self, request: pb.ListRolloutsRequest, *, metadata: CallMetadata = (), timeout: float | None = None
    ) -> pb.ListRolloutsResponse:
        """Reads a page of the rollouts of all servers."""
        # In an order that does not depend on who listed the servers, so that a page token fits any gateway before them.
        members = sorted(self._places.members, key=lambda member: member.address)
        return await merged_page(members, request, StartConstraints.of(metadata, timeout))

    async def CancelRollouts(
        self, request: pb.CancelRolloutsRequest, *, metadata: CallMetadata = (), timeout: float | None = None
    ) -> pb.CancelRolloutsResponse:
        """Asks rollouts to end, wherever they are. Nothing is asked to end if one of the uids is nowhere.

        If a server fails, others may have done what was asked; as for one server, the call can be repeated freely.
        """
        terms = StartConstraints.of(metadata, timeout)
        uids = list(dict.fromkeys(request.selection.uids))
        owners = await self._places.owners(uids, terms) if uids else None

        async def ask(member: Member) -> Sequence[str]:
            if owners is not None and member not in owners:
                return ()
            theirs = pb.CancelRolloutsRequest()
            theirs.CopyFrom(request)
            if owners is not None:
                theirs.selection.uids[:] = owners[member]
            answer = await member.stub.CancelRollouts(theirs, metadata=terms.metadata, timeout=terms.left)
            return answer.uids

        answers = await self._places.everywhere(ask)
        if answers.failures:
            raise self._failure(answers, terms, "what they have was not asked to end")
        return pb.CancelRolloutsResponse(uids=[uid for _, theirs in answers.found for uid in theirs])

    async def ListTools(
        self, request: pb.ListToolsRequest, *, metadata: CallMetadata = (), timeout: float | None = None
    ) -> pb.ListToolsResponse:
        """The tools of an agent, from the first server that can be reached and has it."""
        terms = StartConstraints.of(metadata, timeout)

        async def ask(member: Member) -> pb.ListToolsResponse:
            return await member.stub.ListTools(request, metadata=terms.metadata, timeout=terms.left)

        return await self._places.anybody(ask, terms)

    async def ListAgents(
        self, request: pb.ListAgentsRequest, *, metadata: CallMetadata = (), timeout: float | None = None
    ) -> pb.ListAgentsResponse:
        """The agents of the servers that can be reached, each name once."""
        terms = StartConstraints.of(metadata, timeout)

        async def ask(member: Member) -> pb.ListAgentsResponse:
            seconds = terms.at_most(_SUMMARY_SECONDS)
            return await member.stub.ListAgents(request, metadata=terms.metadata, timeout=seconds)

        return united(await self._some(ask, terms))

    async def AnyAgents(
        self, request: pb.ListAgentsRequest, *, metadata: CallMetadata = (), timeout: float | None = None
    ) -> pb.ListAgentsResponse:
        """The agents of the server that answers first: one that hangs delays nobody."""
        terms = StartConstraints.of(metadata, timeout)

        async def ask(member: Member) -> pb.ListAgentsResponse:
            return await member.stub.ListAgents(request, metadata=terms.metadata, timeout=terms.left)

        return await self._places.soonest(ask, terms, _NOBODY)

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, *, metadata: CallMetadata = (), timeout: float | None = None
    ) -> pb.GetServerInfoResponse:
        """What the servers that can be reached are and can do together."""
        terms = StartConstraints.of(metadata, timeout)

        async def ask(member: Member) -> pb.GetServerInfoResponse:
            seconds = terms.at_most(_SUMMARY_SECONDS)
            return await member.stub.GetServerInfo(request, metadata=terms.metadata, timeout=seconds)

        return summed(await self._some(ask, terms))

    async def _some(self, ask: Callable[[Member], Awaitable[_T]], terms: StartConstraints) -> Sequence[_T]:
        answers = await self._places.everywhere(ask)
        if not answers.found:
            raise self._failure(answers, terms, _NOBODY)
        return [answer for _, answer in answers.found]

    def _failure(self, answers: FleetResponses[_T], terms: StartConstraints, consequence: str) -> grpc.aio.AioRpcError:
        return combined(answers.failures, len(self._places.members), consequence, over=terms.over)
