"""Routing in a fleet: which server receives a start, and which server has a rollout.

A server that is unreachable, or that drains, has not accepted a start, so the start goes to the next server in its order. If a
connection breaks during a start, the server may have accepted it. The gateway repeats the start there once, under the same
request id, and goes on to the next server only if this one is unreachable by then. Without a request id the start fails.

A uid begins with the id of its server. If that id is unknown so far, the gateway queries all servers. As long as one of them
is unreachable, the error is UNAVAILABLE and not NOT_FOUND.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import Message
from osmosis.rollout.v1 import agent_service_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1.agent_service_pb2 import GetModelAccessRequest
from osmosis.rollout.v1.group_pb2 import GetGroupRequest

from rollout_gateway.fleet.errors import (
    combined,
    is_elsewhere,
    is_lost,
    is_missing,
    is_unsure,
    too_late,
    unknown_rollout,
    unreachable,
)
from rollout_gateway.fleet.members import CallContext, Member, Recent, Start, StartKey, ranked, start_key

_CONNECT_SECONDS: Final = 6.0
_PART_SECONDS: Final = 0.5
_LOOK_SECONDS: Final = 10.0
_MAX_UIDS: Final = 1000
_MAY_BE_THERE: Final = "one of them may have the rollout"
_T = TypeVar("_T")


class Routing:
    """Knows the servers, the server ids seen so far, and the starts that their first server did not accept."""

    def __init__(self, members: Sequence[Member], *, failover: bool = True) -> None:
        self.members = members
        self._failover = failover
        self._here: Member | None = None
        self._servers: Recent[str] = Recent()
        # Starts that a later server accepted. Their duplicates must go there too, even when the first server is back.
        self._strays: Recent[StartKey | None] = Recent()

    def serve_here(self, member: Member, channel: grpc.aio.Channel) -> None:
        """Record that `member` is in this process, reached through `channel`. Starts without a request id stay here."""
        self._here = member
        member.call_directly(channel)

    def remember(self, uid: str, member: Member) -> None:
        """Record that `member` has this rollout, and so every rollout whose uid has the same server id."""
        self._servers[_server_id(uid)] = member

    def owner_seen(self, uid: str) -> Member | None:
        """Return the server that has this rollout, or the group that a server named, if its server id was seen."""
        return self._servers.get(_server_id(uid))

    def first(self, start: Start) -> Member | None:
        """Return the server to which a start is offered first; None if it may be any, because it has no request id."""
        key = start_key(start)
        return None if key is None else self._strays.get(key) or ranked(self.members, key)[0]

    async def offer(
        self, start: Start, context: CallContext, start_on: Callable[[Member], Awaitable[_T]]
    ) -> tuple[Member, _T]:
        """Offer a start to one server after the other. Returns the first that accepts it, and its response.

        Raises AioRpcError.
        """
        key = start_key(start)
        order = ranked(self.members, key)[: None if self._failover else 1]
        if key is None and self._here is not None:
            order = [self._here]
        stray = self._strays.get(key)
        refusals: list[grpc.aio.AioRpcError] = []
        # The sort is stable: the server that accepted a duplicate comes first, the others keep their order.
        for member in sorted(order, key=lambda each: each is not stray):
            try:
                response = await _attempt(member, key is not None, context, start_on)
            except grpc.aio.AioRpcError as error:
                if not is_elsewhere(error):
                    raise
                refusals.append(error)
                continue
            if response is None:
                continue
            self._strays.pop(key, None)
            if key and member is not order[0]:
                self._strays[key] = member
            return member, response
        if context.over:
            raise too_late()
        # No server accepted. Prefer a refusal that can pass (draining) to NOT_FOUND, which is certain only if all responded.
        away = len(order) - len(refusals)
        for refusal in sorted(refusals, key=is_missing):
            if not away or not is_missing(refusal):
                raise refusal
        raise unreachable(away, len(order), "nothing was started")

    async def owner(self, uid: str, context: CallContext) -> Member:
        """Return the server that has a rollout. Raises AioRpcError: NOT_FOUND if no server has it, or a server's error."""
        if _server_id(uid) not in self._servers:
            look = pb.GetRolloutRequest(uid=uid)
            found, _ = await self.soonest("GetRollout", look, context, _MAY_BE_THERE, most=_LOOK_SECONDS)
            self.remember(uid, found)
        return self._servers[_server_id(uid)]

    async def owner_of(self, request: Any, context: CallContext) -> Member:
        """Return the server that has the request's rollout or group. Raises AioRpcError as `owner` does.

        A group id that a server made begins with the server's id. For a caller's own id all servers are asked each time.
        """
        if request.DESCRIPTOR.file is agent_service_pb2.DESCRIPTOR:
            return await self._key_owner(request.uid, context)
        if not hasattr(request, "group_id"):
            return await self.owner(request.uid, context)
        if _server_id(request.group_id) in self._servers:
            return self._servers[_server_id(request.group_id)]
        look = GetGroupRequest(group_id=request.group_id)
        found, response = await self.soonest("GetGroup", look, context, _MAY_BE_THERE, most=_LOOK_SECONDS)
        self.remember(response.group.members[0].uid, found)
        return found

    async def _key_owner(self, uid: str, context: CallContext) -> Member:
        """Return the server that accepts the key of the rollout, which is valid for no other rpc. Raises AioRpcError."""
        if _server_id(uid) not in self._servers:
            look = GetModelAccessRequest(uid=uid)
            found, _ = await self.soonest("GetModelAccess", look, context, _MAY_BE_THERE, most=_LOOK_SECONDS)
            self.remember(uid, found)
        return self._servers[_server_id(uid)]

    async def owners(self, uids: Sequence[str], context: CallContext) -> Mapping[Member, Sequence[str]]:
        """Return the uids by the server that has them. Raises AioRpcError: NOT_FOUND if any of the rollouts does not exist."""
        owners: dict[Member, list[str]] = {}
        for uid in uids:
            owners.setdefault(await self.owner(uid, context), []).append(uid)
        if len(owners) > 1:
            # A server may have dropped a finished rollout. A single server checks that itself; across servers, check first.
            look = pb.ListRolloutsRequest(selection=pb.Selection(uids=uids), page_size=_MAX_UIDS)
            found = await self.call_all("ListRollouts", dict.fromkeys(owners, look), context, _MAY_BE_THERE)
            there = {rollout.uid for page in found.values() for rollout in page.rollouts}
            for uid in uids:
                if uid not in there:
                    raise unknown_rollout(uid)
        return owners

    async def soonest(
        self, rpc: str, request: Message, context: CallContext, consequence: str, most: float | None = None
    ) -> tuple[Member, Any]:
        """Call all servers at once. Returns the first that responds, and its response. Raises AioRpcError.

        Servers that are unreachable, or do not have the requested rollout or agent, are skipped.
        """

        async def call(member: Member) -> tuple[Member, Any]:
            return member, await member.call(rpc, request, context, most)

        tasks = [asyncio.create_task(call(member)) for member in self.members]
        failures: list[grpc.aio.AioRpcError] = []
        try:
            for response in asyncio.as_completed(tasks):
                try:
                    return await response
                except grpc.aio.AioRpcError as error:
                    # A server refuses the key of a rollout of another server.
                    foreign = rpc == "GetModelAccess" and error.code() is grpc.StatusCode.PERMISSION_DENIED
                    if not is_unsure(error) and not is_missing(error) and not foreign:
                        raise
                    failures.append(error)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        unsure = [error for error in failures if is_unsure(error)]
        raise combined(unsure, len(tasks), consequence, over=context.over) if unsure else failures[0]

    async def call_all(
        self,
        rpc: str,
        requests: Mapping[Member, Message],
        context: CallContext,
        consequence: str,
        most: float | None = None,
    ) -> dict[Member, Any]:
        """Call several servers at once and return their responses. Raises AioRpcError of the first that refuses the request.

        An unreachable server fails the call. With `most`, in seconds, it does so only if no server responds within that time.
        """
        calls = (member.call(rpc, request, context, most) for member, request in requests.items())
        found: dict[Member, Any] = {}
        failures: list[grpc.aio.AioRpcError] = []
        for member, each in zip(requests, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(each, grpc.aio.AioRpcError) and is_unsure(each):
                failures.append(each)
            elif isinstance(each, BaseException):
                raise each
            else:
                found[member] = each
        if failures and (most is None or not found):
            raise combined(failures, len(self.members), consequence, over=context.over)
        return found


def _server_id(uid: str) -> str:
    """Return the server id in a uid; the whole uid if it has none."""
    return uid.rpartition("-")[0] or uid


async def _attempt(
    member: Member, repeatable: bool, context: CallContext, start_on: Callable[[Member], Awaitable[_T]]
) -> _T | None:
    """Return a server's response to a start; None if it is unreachable.

    Raises AioRpcError if the server refuses the start, or may have accepted it.
    """
    # Two attempts; only one if the start has no request id, because a repeat could start a second rollout.
    for is_last in (not repeatable, True):
        if not await member.reached(context.seconds(_CONNECT_SECONDS)):
            break
        try:
            return await start_on(member)
        except grpc.aio.AioRpcError as error:
            if is_last or not is_lost(error):
                raise
            await member.parted(context.seconds(_PART_SECONDS))
    return None
