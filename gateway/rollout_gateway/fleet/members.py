"""The servers of a fleet: in which order a rollout is offered to them, and where rollouts are."""

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeVar
from uuid import uuid4

import grpc
from osmosis.rollout.v1.rollout_service_pb2 import StartRolloutRequest
from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub

from rollout_gateway.channel import ServerChannel

if TYPE_CHECKING:
    from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceAsyncStub

CONNECT_SECONDS: Final = 6.0
PART_SECONDS: Final = 0.5
_READY: Final = grpc.ChannelConnectivity.READY
_AWAY: Final = (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN)
_Key = TypeVar("_Key", bound=Hashable)

#: What tells duplicates of a start: the completion URL and the request id.
StartKey = tuple[str, str]


class Member:
    """One server."""

    def __init__(self, channel: ServerChannel) -> None:
        self.address = channel.address
        self.stub: RolloutServiceAsyncStub = RolloutServiceStub(channel)
        self._channel = channel

    async def reached(self, seconds: float) -> bool:
        """Whether it is connected, or could be within `seconds`: then what is sent arrives, unless the connection breaks."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while (state := self._channel.get_state(try_to_connect=True)) is not _READY:
                    if state in _AWAY:
                        return False
                    await self._channel.wait_for_state_change(state)
                return True
        return False

    async def parted(self, seconds: float) -> None:
        """Waits, at most `seconds`, until a connection that broke under a call is given up: what is sent before breaks with it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._channel.wait_for_state_change(_READY)


@dataclass(frozen=True, slots=True)
class StartConstraints:
    """On what terms a request to the fleet is answered: in whose name, and until when on the monotonic clock."""

    metadata: tuple[tuple[str, str], ...]
    ends: float | None

    @classmethod
    def of(cls, metadata: tuple[tuple[str, str], ...] | None, timeout: float | None) -> "StartConstraints":
        """The terms of a call that begins now; `timeout` in seconds."""
        return cls(metadata or (), None if timeout is None else time.monotonic() + timeout)

    @property
    def left(self) -> float | None:
        """Seconds, negative once it is over; None: for ever."""
        return None if self.ends is None else self.ends - time.monotonic()

    @property
    def over(self) -> bool:
        """Whether nothing is left."""
        return self.ends is not None and time.monotonic() >= self.ends

    def at_most(self, seconds: float) -> float:
        """The seconds left, or fewer."""
        left = self.left
        return seconds if left is None else min(left, seconds)


class Recent(Generic[_Key]):
    """Where something was seen last; the least recently used is forgotten over `size`."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._places: OrderedDict[_Key, Member] = OrderedDict()

    def get(self, key: _Key) -> Member | None:
        """Where it is, as far as is known."""
        found = self._places.get(key)
        if found is not None:
            self._places.move_to_end(key)
        return found

    def put(self, key: _Key, member: Member) -> None:
        """It is there."""
        self._places[key] = member
        self._places.move_to_end(key)
        if len(self._places) > self._size:
            self._places.popitem(last=False)

    def drop(self, key: _Key) -> None:
        """It is not there, or where it is to be expected."""
        self._places.pop(key, None)


def start_key(start: StartRolloutRequest) -> StartKey | None:
    """What duplicates of a start have in common; None for one that has none."""
    return (start.spec.completions.url.rstrip("/"), start.request_id) if start.request_id else None


def ranked(members: Sequence[Member], key: StartKey | None) -> list[Member]:
    """Rendezvous hashing: every gateway gives a key the same order, and a server more or less moves only its own share.

    Without a key the order is random.
    """
    drawn = "\0".join(key or ("", uuid4().hex)).encode()
    return sorted(members, key=lambda member: hashlib.blake2b(drawn, key=_short(member.address)).digest(), reverse=True)


def _short(address: str) -> bytes:
    return hashlib.sha256(address.encode()).digest()
