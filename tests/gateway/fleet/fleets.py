"""Several real servers behind proxies, and gateways in front of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_gateway.channel import open_channel
from rollout_gateway.fleet.fleet import Fleet

from tests.support.agents import Gated, Idle
from tests.support.server_client import Caller, serving
from tests.support.tcp_proxy import TcpProxy


@dataclass(frozen=True)
class FleetMember:
    """A server, a direct channel to it, and the proxy through which others reach it."""

    caller: Caller
    proxy: TcpProxy
    gated: Gated

    async def rollouts(self) -> Sequence[pb.Rollout]:
        """All its rollouts, newest first."""
        found = await self.caller.stub.ListRollouts(pb.ListRolloutsRequest(page_size=1000))
        listed: Sequence[pb.Rollout] = found.rollouts
        return listed


@dataclass(frozen=True)
class Fleets:
    """Servers, and a gateway's fleet in front of them."""

    places: Sequence[FleetMember]
    fleet: Fleet
    stack: AsyncExitStack

    async def another(self) -> Fleet:
        """The fleet of another gateway with the same servers in another order."""
        return await _fleet(self.stack, [place.proxy.address for place in reversed(self.places)])

    async def all(self) -> Sequence[tuple[FleetMember, pb.Rollout]]:
        """All rollouts of all servers, with their server."""
        return [(place, rollout) for place in self.places for rollout in await place.rollouts()]

    def at(self, address: str) -> FleetMember:
        """The member with this address."""
        (found,) = [place for place in self.places if place.proxy.address == address]
        return found


async def _fleet(stack: AsyncExitStack, addresses: Iterable[str]) -> Fleet:
    channels = [await stack.enter_async_context(open_channel(address)) for address in addresses]
    return Fleet(channels)


@asynccontextmanager
async def fleets(count: int = 3, **settings: Any) -> AsyncIterator[Fleets]:
    """This many servers, each with the agents `gated` and `idle`."""
    async with AsyncExitStack() as stack:
        places = []
        for _ in range(count):
            gated = Gated()
            caller = await stack.enter_async_context(serving(gated, Idle(), **settings))
            places.append(
                FleetMember(caller, await stack.enter_async_context(TcpProxy(caller.server.grpc_port)), gated)
            )
        yield Fleets(places, await _fleet(stack, [place.proxy.address for place in places]), stack)
