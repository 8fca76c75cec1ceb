"""Pages over several servers: rollouts newest first, whoever has them.

Each server is read from where the last page ended: the token of the server's own page, and the last rollout taken from it. A
page that was used in part is read again and passed over up to that rollout. What has started since is passed over as well, for
it is newer than all that was told; what has gone meanwhile is not missed, for nothing is counted.
"""

import asyncio
import base64
import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import grpc
import msgspec
from osmosis.rollout.v1.rollout_service_pb2 import (
    ROLLOUT_VIEW_BASIC,
    ROLLOUT_VIEW_UNSPECIFIED,
    ListRolloutsRequest,
    ListRolloutsResponse,
    Rollout,
)

from rollout_gateway.fleet.errors import combined, invalid
from rollout_gateway.fleet.members import Member, StartConstraints

_MAX_PAGE: Final = 1000
_DEFAULT_PAGE: Final = 100
_LIGHT: Final = (ROLLOUT_VIEW_UNSPECIFIED, ROLLOUT_VIEW_BASIC)

#: Creation time in nanoseconds, then uid: rollouts are told from the highest down.
_Key = tuple[int, str]


class _ServerPosition(msgspec.Struct, array_like=True):
    """How far a server was read: the token of its page, none for the first one, and the last rollout that was told of it.

    `used`: at the beginning of the page there may be rollouts that were told, or that are newer.
    """

    token: str = ""
    last_uid: str = ""
    used: bool = True
    over: bool = False


class _Token(msgspec.Struct, array_like=True):
    """A page token. `fits` tells for which selection and servers it is; what comes next is older than `time` and `uid`."""

    fits: str
    time: int
    uid: str
    places: list[_ServerPosition]


@dataclass
class _Reader:
    """Reads one server's pages."""

    member: Member
    place: _ServerPosition
    after: _Key | None
    ahead: deque[Rollout] = field(default_factory=deque)
    next_token: str = ""

    async def fill(self, request: ListRolloutsRequest, terms: StartConstraints) -> None:
        """Reads on until there is a rollout to tell, or none is left."""
        asked = ListRolloutsRequest()
        asked.CopyFrom(request)
        while not self.ahead and not self.place.over:
            if self.next_token:
                last_uid = self.place.last_uid if self.after is not None else ""
                self.place = _ServerPosition(self.next_token, last_uid, used=self.after is not None)
                self.next_token = ""
            asked.page_token = self.place.token
            page = await self.member.stub.ListRollouts(asked, metadata=terms.metadata, timeout=terms.left)
            self.ahead.extend(self._untold(page.rollouts))
            self.next_token = page.next_page_token
            self.place.over = not self.ahead and not self.next_token
            if asked.view in _LIGHT:
                # All of it was told: there may be much more that has started since.
                asked.page_size = min(2 * asked.page_size, _MAX_PAGE)

    def take(self) -> Rollout:
        """The next rollout."""
        taken = self.ahead.popleft()
        self.place.last_uid, self.place.used = taken.uid, True
        if not self.ahead:
            self.place = _ServerPosition(token=self.next_token, used=False, over=not self.next_token)
            self.next_token = ""
            self.after = None
        return taken

    def _untold(self, page: Sequence[Rollout]) -> Sequence[Rollout]:
        for index, rollout in enumerate(page):
            if rollout.uid == self.place.last_uid:
                self.after = None
                return page[index + 1 :]
        if self.after is None:
            return page
        first = next((index for index, rollout in enumerate(page) if _key(rollout) < self.after), len(page))
        return page[first:]


async def merged_page(
    members: Sequence[Member], request: ListRolloutsRequest, terms: StartConstraints
) -> ListRolloutsResponse:
    """One page over all servers.

    Raises AioRpcError: INVALID_ARGUMENT for a wrong size or token, UNAVAILABLE where a server is away, for the page would not be
    whole, or what a server answers.
    """
    if request.page_size > _MAX_PAGE:
        raise invalid("page_size", f"at most {_MAX_PAGE} are allowed")
    size = request.page_size or _DEFAULT_PAGE
    fits = _fits(members, request)
    readers = _readers(members, request.page_token, fits)
    part = ListRolloutsRequest()
    part.CopyFrom(request)
    # Twice its share of each server: most pages need no second look, and little is read in vain.
    part.page_size = min(size, 2 * size // len(readers) + 1)
    told: list[Rollout] = []
    await _filled(readers, part, terms, len(members))
    while len(told) < size and (ahead := [reader for reader in readers if reader.ahead]):
        newest = max(ahead, key=lambda reader: _key(reader.ahead[0]))
        told.append(newest.take())
        if len(told) < size:
            await _filled([newest], part, terms, len(members))
    more = bool(told) and any(reader.ahead or not reader.place.over for reader in readers)
    return ListRolloutsResponse(rollouts=told, next_page_token=_written(fits, told[-1], readers) if more else "")


async def _filled(
    readers: Sequence[_Reader], request: ListRolloutsRequest, terms: StartConstraints, servers: int
) -> None:
    if all(reader.ahead or reader.place.over for reader in readers):
        return
    ended = await asyncio.gather(*(reader.fill(request, terms) for reader in readers), return_exceptions=True)
    failures = [each for each in ended if isinstance(each, grpc.aio.AioRpcError)]
    if failures:
        raise combined(failures, servers, "the list would not be whole", over=terms.over)
    for each in ended:
        if each is not None:
            raise each


def _readers(members: Sequence[Member], page_token: str, fits: str) -> list[_Reader]:
    if not page_token:
        return [_Reader(member, _ServerPosition(), None) for member in members]
    try:
        token = msgspec.json.decode(base64.b64decode(page_token.encode(), altchars=b"-_", validate=True), type=_Token)
    except (ValueError, msgspec.DecodeError):
        raise invalid("page_token", "is not one of ours") from None
    if token.fits != fits or len(token.places) != len(members):
        raise invalid("page_token", "belongs to another selection, or to other servers")
    after = (token.time, token.uid)
    return [
        _Reader(member, place, after if place.used else None)
        for member, place in zip(members, token.places, strict=True)
    ]


def _written(fits: str, last: Rollout, readers: Sequence[_Reader]) -> str:
    time, uid = _key(last)
    token = _Token(fits, time, uid, [reader.place for reader in readers])
    return base64.b64encode(msgspec.json.encode(token), altchars=b"-_").decode()


def _fits(members: Sequence[Member], request: ListRolloutsRequest) -> str:
    selection = request.selection.SerializeToString(deterministic=True)
    servers = "\0".join(member.address for member in members).encode()
    return hashlib.sha256(hashlib.sha256(servers).digest() + selection).hexdigest()[:16]


def _key(rollout: Rollout) -> _Key:
    created = rollout.create_time
    return created.seconds * 1_000_000_000 + created.nanos, rollout.uid
