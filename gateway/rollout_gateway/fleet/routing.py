"""Which of several servers a call is for: who takes a start, who has a rollout.

A server that cannot be reached, or drains, has taken nothing, and the next one in a start's order is asked. A connection that
breaks under a start is another matter: the server may have taken it. It is asked once more under the same request id, and only
if it is not there any more the next one is; without a request id the start fails.

Where a rollout is, all servers are asked as long as nobody knows. While one of them is away, the answer is not "there is none"
but "a server is away".
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import grpc
from osmosis.rollout.v1 import rollout_service_pb2 as pb

from rollout_gateway.fleet.errors import (
    combined,
    is_elsewhere,
    is_lost,
    is_unsure,
    too_late,
    unknown_rollout,
    unreachable,
)
from rollout_gateway.fleet.members import (
    CONNECT_SECONDS,
    PART_SECONDS,
    Member,
    Recent,
    StartConstraints,
    StartKey,
    ranked,
    start_key,
)

_KNOWN_ROLLOUTS: Final = 100_000
_KNOWN_STARTS: Final = 10_000
_LOOK_SECONDS: Final = 10.0
_ATTEMPTS: Final = 2
_MAX_UIDS: Final = 1000
_MAY_BE_THERE: Final = "the rollout may be there"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class FleetResponses(Generic[_T]):
    """What the servers answered that could, in the fleet's order, and how the others failed."""

    found: Sequence[tuple[Member, _T]]
    failures: Sequence[grpc.aio.AioRpcError]


class Routing:
    """Knows the servers, where the latest rollouts are, and which starts were not taken where they belong."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members
        self._rollouts: Recent[str] = Recent(_KNOWN_ROLLOUTS)
        # A duplicate of these must not go to the first server in its order, should that one be back.
        self._strays: Recent[StartKey] = Recent(_KNOWN_STARTS)

    def note(self, uid: str, member: Member) -> None:
        """A rollout is there."""
        self._rollouts.put(uid, member)

    async def offer(
        self, start: pb.StartRolloutRequest, terms: StartConstraints, ask: Callable[[Member], Awaitable[_T]]
    ) -> _T:
        """What the first server answers that takes the start. Raises AioRpcError."""
        key = start_key(start)
        order = ranked(self.members, key)
        stray = self._strays.get(key) if key else None
        refusal: grpc.aio.AioRpcError | None = None
        away = 0
        for member in sorted(order, key=lambda each: each is not stray):
            try:
                answer = await _taken(member, key is not None, terms, ask)
            except _Away:
                away += 1
            except grpc.aio.AioRpcError as error:
                if not is_elsewhere(error):
                    raise
                if refusal is None or refusal.code() is grpc.StatusCode.NOT_FOUND:
                    refusal = error
            else:
                if key:
                    self._note_start(key, member, order[0])
                return answer
        if terms.over:
            raise too_late()
        if refusal is not None and (not away or refusal.code() is not grpc.StatusCode.NOT_FOUND):
            raise refusal
        raise unreachable(away, len(order), "nothing was started")

    async def owner(self, uid: str, terms: StartConstraints) -> Member:
        """The server that has a rollout. Raises AioRpcError: NOT_FOUND if all servers say so, or what one of them says."""
        known = self._rollouts.get(uid)
        if known is None:
            known = await self._found(uid, terms)
            self._rollouts.put(uid, known)
        return known

    async def owners(self, uids: Sequence[str], terms: StartConstraints) -> Mapping[Member, Sequence[str]]:
        """The servers that have rollouts. Raises AioRpcError, NOT_FOUND also if only one of the rollouts is nowhere."""
        if len(uids) == 1:
            return {await self.owner(uids[0], terms): uids}
        asked = pb.ListRolloutsRequest(selection=pb.Selection(uids=uids), page_size=_MAX_UIDS)

        async def ask(member: Member) -> Sequence[str]:
            page = await member.stub.ListRollouts(asked, metadata=terms.metadata, timeout=terms.left)
            return [rollout.uid for rollout in page.rollouts]

        answers = await self.everywhere(ask)
        found = {uid for _, theirs in answers.found for uid in theirs}
        missing = [uid for uid in uids if uid not in found]
        if missing and answers.failures:
            raise combined(answers.failures, len(self.members), _MAY_BE_THERE, over=terms.over)
        if missing:
            raise unknown_rollout(missing[0])
        return {member: theirs for member, theirs in answers.found if theirs}

    async def anybody(self, ask: Callable[[Member], Awaitable[_T]], terms: StartConstraints) -> _T:
        """What the first server answers that can be reached and knows what it is asked for. Raises AioRpcError."""
        unknown: grpc.aio.AioRpcError | None = None
        failures: list[grpc.aio.AioRpcError] = []
        for member in self.members:
            if not await member.reached(terms.at_most(CONNECT_SECONDS)):
                failures.append(unreachable(1, 1, "it was not asked"))
                continue
            try:
                return await ask(member)
            except grpc.aio.AioRpcError as error:
                if is_unsure(error):
                    failures.append(error)
                elif error.code() is grpc.StatusCode.NOT_FOUND:
                    unknown = unknown or error
                else:
                    raise
        if unknown is not None and not failures:
            raise unknown
        raise combined(failures, len(self.members), "they may know what was asked for", over=terms.over)

    async def everywhere(self, ask: Callable[[Member], Awaitable[_T]]) -> FleetResponses[_T]:
        """Asks all servers at once. Raises the AioRpcError of the first that refuses the call as such."""

        async def asked(member: Member) -> _T:
            return await ask(member)

        ended = await asyncio.gather(*(asked(member) for member in self.members), return_exceptions=True)
        found: list[tuple[Member, _T]] = []
        failures: list[grpc.aio.AioRpcError] = []
        for member, each in zip(self.members, ended, strict=True):
            if isinstance(each, grpc.aio.AioRpcError) and is_unsure(each):
                failures.append(each)
            elif isinstance(each, BaseException):
                raise each
            else:
                found.append((member, each))
        return FleetResponses(found, failures)

    async def _found(self, uid: str, terms: StartConstraints) -> Member:
        asked = pb.GetRolloutRequest(uid=uid)

        async def has(member: Member) -> Member:
            await member.stub.GetRollout(asked, metadata=terms.metadata, timeout=terms.at_most(_LOOK_SECONDS))
            return member

        return await self.soonest(has, terms, _MAY_BE_THERE)

    async def soonest(
        self, ask: Callable[[Member], Coroutine[Any, Any, _T]], terms: StartConstraints, consequence: str
    ) -> _T:
        """What the first server to answer says; all are asked at once. Raises AioRpcError.

        A server that cannot be reached, and one that does not know what it is asked for, leave it to the others.
        """
        asking = [asyncio.create_task(ask(member)) for member in self.members]
        failures: list[grpc.aio.AioRpcError] = []
        try:
            for answer in asyncio.as_completed(asking):
                try:
                    return await answer
                except grpc.aio.AioRpcError as error:
                    if not is_unsure(error) and error.code() is not grpc.StatusCode.NOT_FOUND:
                        raise
                    failures.append(error)
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        unsure = [error for error in failures if is_unsure(error)]
        raise combined(unsure, len(asking), consequence, over=terms.over) if unsure else failures[0]

    def _note_start(self, key: StartKey, member: Member, first: Member) -> None:
        if member is first:
            self._strays.drop(key)
        else:
            self._strays.put(key, member)


class _Away(Exception):
    """The server cannot be reached."""


async def _taken(
    member: Member, repeatable: bool, terms: StartConstraints, ask: Callable[[Member], Awaitable[_T]]
) -> _T:
    """What a server answers to a start. Raises _Away, and AioRpcError if it refuses, or may have taken it."""
    attempt = 1
    while await member.reached(terms.at_most(CONNECT_SECONDS)):
        try:
            return await ask(member)
        except grpc.aio.AioRpcError as error:
            if not is_lost(error) or not repeatable or attempt == _ATTEMPTS:
                raise
            await member.parted(terms.at_most(PART_SECONDS))
        attempt += 1
    raise _Away
