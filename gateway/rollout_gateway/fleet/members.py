"""Servers of a fleet: how they are called, and in which order a start is offered to them."""

import asyncio
import hashlib
import time
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast
from uuid import uuid4

import grpc
from google.protobuf.message import Message
from osmosis.rollout.v1.agent_service_pb2_grpc import AgentServiceStub
from osmosis.rollout.v1.group_pb2 import StartGroupRequest
from osmosis.rollout.v1.rollout_service_pb2 import StartRolloutRequest
from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub

from rollout_gateway.channel import ServerChannel

if TYPE_CHECKING:
    from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceAsyncStub

_READY: Final = grpc.ChannelConnectivity.READY
_AWAY: Final = (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN)
_MOST_REMEMBERED: Final = 10_000
_Key = TypeVar("_Key", bound=Hashable)

#: The start of a rollout or of a group.
Start = StartRolloutRequest | StartGroupRequest
#: Identifies duplicates of a start: the completion URL and the request id.
StartKey = tuple[str, str]


@dataclass(frozen=True, slots=True)
class CallContext:
    """Metadata of a request to the fleet, and its deadline on the monotonic clock (None: no deadline)."""

    metadata: tuple[tuple[str, str], ...]
    ends: float | None

    @property
    def over(self) -> bool:
        """Whether the deadline has passed."""
        return self.ends is not None and time.monotonic() >= self.ends

    def seconds(self, most: float | None = None) -> float | None:
        """Return the time left, at most `most`; negative after the deadline. None: no limit."""
        if self.ends is None:
            return most
        left = self.ends - time.monotonic()
        return left if most is None else min(left, most)

    def options(self, most: float | None = None) -> dict[str, Any]:
        """Return the keyword arguments of a gRPC call that may take at most `most` seconds."""
        return {"metadata": self.metadata, "timeout": self.seconds(most)}


class ServerStub(RolloutServiceStub, AgentServiceStub):
    """The rpcs of both services of a rollout server."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        # The generated types describe the constructors as `__new__`.
        RolloutServiceStub.__init__(self, channel)  # type: ignore[call-arg]
        AgentServiceStub.__init__(self, channel)  # type: ignore[call-arg]


class Member:
    """One server of a fleet."""

    def __init__(self, channel: ServerChannel) -> None:
        self.address = channel.address
        self.stub = cast("RolloutServiceAsyncStub", ServerStub(channel))
        #: None: the server is in this process.
        self._channel: ServerChannel | None = channel

    def call_directly(self, channel: grpc.aio.Channel) -> None:
        """From now on call the server through `channel`, which needs no connection: the server is in this process."""
        self.stub = cast("RolloutServiceAsyncStub", ServerStub(channel))
        self._channel = None

    async def call(self, rpc: str, request: Message, context: CallContext, most: float | None = None) -> Any:
        """Call a unary rpc."""
        return await getattr(self.stub, rpc)(request, **context.options(most))

    async def reached(self, seconds: float | None) -> bool:
        """Return whether the server is connected, or connects within `seconds`. If so, a call sent now arrives."""
        if self._channel is None:
            return True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while (state := self._channel.get_state(try_to_connect=True)) is not _READY:
                    if state in _AWAY:
                        return False
                    await self._channel.wait_for_state_change(state)
                return True
        return False

    async def parted(self, seconds: float | None) -> None:
        """Wait up to `seconds` until the channel has noticed that its connection broke. A call before that would fail again."""
        if self._channel is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._channel.wait_for_state_change(_READY)


class Recent(dict[_Key, Member]):
    """Server by key, for the `_MOST_REMEMBERED` keys that were set last."""

    def __setitem__(self, key: _Key, member: Member) -> None:
        self.pop(key, None)
        super().__setitem__(key, member)
        if len(self) > _MOST_REMEMBERED:
            del self[next(iter(self))]


def start_key(start: Start) -> StartKey | None:
    """Return the key that all duplicates of a start share; None for a start without a request id."""
    return (start.spec.completions.url.rstrip("/"), start.request_id) if start.request_id else None


def ranked(members: Sequence[Member], key: StartKey | None) -> list[Member]:
    """Order the servers for a start by rendezvous hashing.

    Every gateway computes the same order for a key. Adding or removing a server moves only its own share of the keys. Without
    a key the order is random.
    """
    drawn = "\0".join(key or ("", uuid4().hex)).encode()

    def rank(member: Member) -> bytes:
        return hashlib.blake2b(drawn, key=hashlib.sha256(member.address.encode()).digest()).digest()

    return sorted(members, key=rank, reverse=True)
