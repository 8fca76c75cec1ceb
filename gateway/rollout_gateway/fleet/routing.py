"""Which of several servers a call is for: who takes a start, who has a rollout.

A server that cannot be reached, or drains, has taken nothing, and the next one in a start's order is asked. A connection that
breaks under a start is another matter: the server may have taken it. It is asked once more under the same request id, and only
if it is not there any more the next one is; without a request id the start fails.

A rollout's uid begins with the id of its server. All servers are asked for the first rollout of a server whose id is not known
yet. While one of them is away, the answer is not "there is none" but "a server is away".
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import Message
from osmosis.rollout.v1 import rollout_service_pb2 as pb

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
from rollout_gateway.fleet.members import CallContext, Member, Recent, StartKey, ranked, start_key

_CONNECT_SECONDS: Final = 6.0
_PART_SECONDS: Final = 0.5
_LOOK_SECONDS: Final = 10.0
_MAX_UIDS: Final = 1000
_MAY_BE_THERE: Final = "the rollout may be there"
_T = TypeVar("_T")


class Routing:
    """Knows the servers, their ids as far as they were seen, and which starts were not taken where they belong."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members
        self._servers: Recent[str] = Recent()
        # A duplicate of these must not go to the first server in its order, should that one be back.
        self._strays: Recent[StartKey | None] = Recent()

    def remember(self, uid: str, member: Member) -> None:
        """A rollout is there, and with it all that have its server's id."""
        self._servers[_server_id(uid)] = member

    async def offer(
        self, start: pb.StartRolloutRequest, context: CallContext, start_on: Callable[[Member], Awaitable[_T]]
    ) -> tuple[Member, _T]:
        """The first server that takes the start, and what it answers. Raises AioRpcError."""
        key = start_key(start)
        order = ranked(self.members, key)
        stray = self._strays.get(key)
        refusals: list[grpc.aio.AioRpcError] = []
        for member in sorted(order, key=lambda each: each is not stray):
            try:
                answer = await _attempt(member, key is not None, context, start_on)
            except grpc.aio.AioRpcError as error:
                if not is_elsewhere(error):
                    raise
                refusals.append(error)
                continue
            if answer is None:
                continue
            self._strays.pop(key, None)
            if key and member is not order[0]:
                self._strays[key] = member
            return member, answer
        if context.over:
            raise too_late()
        away = len(order) - len(refusals)
        for refusal in sorted(refusals, key=is_missing):
            if not away or not is_missing(refusal):
                raise refusal
        raise unreachable(away, len(order), "nothing was started")

    async def owner(self, uid: str, context: CallContext) -> Member:
        """The server that has a rollout. Raises AioRpcError: NOT_FOUND if all servers say so, or what one of them says."""
        if _server_id(uid) not in self._servers:
            look = pb.GetRolloutRequest(uid=uid)
            found, _ = await self.soonest("GetRollout", look, context, _MAY_BE_THERE, most=_LOOK_SECONDS)
            self.remember(uid, found)
        return self._servers[_server_id(uid)]

    async def owners(self, uids: Sequence[str], context: CallContext) -> Mapping[Member, Sequence[str]]:
        """The servers that have rollouts. Raises AioRpcError, NOT_FOUND also if only one of the rollouts is nowhere."""
        owners: dict[Member, list[str]] = {}
        for uid in uids:
            owners.setdefault(await self.owner(uid, context), []).append(uid)
        if len(owners) > 1:
            # Some may be forgotten; one server alone finds out by itself.
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
        """The first server to answer and what it says; all are asked at once. Raises AioRpcError.

        A server that cannot be reached, and one that does not know what it is asked for, leave it to the others.
        """

        async def call(member: Member) -> tuple[Member, Any]:
            return member, await member.call(rpc, request, context, most)

        asking = [asyncio.create_task(call(member)) for member in self.members]
        failures: list[grpc.aio.AioRpcError] = []
        try:
            for answer in asyncio.as_completed(asking):
                try:
                    return await answer
                except grpc.aio.AioRpcError as error:
                    if not is_unsure(error) and not is_missing(error):
                        raise
                    failures.append(error)
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        unsure = [error for error in failures if is_unsure(error)]
        raise combined(unsure, len(asking), consequence, over=context.over) if unsure else failures[0]

    async def call_all(
        self,
        rpc: str,
        requests: Mapping[Member, Message],
        context: CallContext,
        consequence: str,
        most: float | None = None,
    ) -> dict[Member, Any]:
        """What servers answer that are called at once. Raises AioRpcError, of the first that refuses the request as such.

        A server that says nothing fails the call; with `most`, in seconds, it does only if all the others say nothing by then.
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
    """The id of the server that made a uid; the whole uid where it is not one of a server of ours."""
    return uid.rpartition("-")[0] or uid


async def _attempt(
    member: Member, repeatable: bool, context: CallContext, start_on: Callable[[Member], Awaitable[_T]]
) -> _T | None:
    """What a server answers to a start; None: it is away. Raises AioRpcError if it refuses, or may have taken it."""
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
