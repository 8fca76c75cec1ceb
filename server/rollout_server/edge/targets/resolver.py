"""Looks names up and lets through only what the rules for targets allow.

aiohttp and gRPC connect to the addresses that come from here and do not look the name up again.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from rollout_server.edge.targets.address import read_address
from rollout_server.edge.targets.host_port import HostName, MalformedTarget, read_host, read_url
from rollout_server.edge.targets.rules import TargetRefused, TargetRules


@dataclass(frozen=True, slots=True)
class GrpcTarget:
    """What a gRPC channel is opened with: a target of addresses only, so that nothing looks the name up again.

    The options keep the name of the URL for `:authority` and for the server's certificate, and lead past any proxy.
    """

    target: str
    options: tuple[tuple[str, str | int], ...]
    secure: bool


class CheckedLookup(AbstractResolver):
    """The resolver of aiohttp's connector, and what resolves gRPC targets. Make it on the event loop it is used on.

    aiohttp does not ask it for hosts that are addresses already; `TargetRules.violations` has checked those.
    """

    def __init__(self, rules: TargetRules, resolver: AbstractResolver | None = None) -> None:
        self.rules = rules
        self._resolver = resolver or aiohttp.DefaultResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """The addresses of a name. Raises `TargetRefused`, and OSError where there are none."""
        self.rules.check(host, port)
        answers = await self._resolver.resolve(host, port, family)
        self.rules.check_addresses(host, port, [answer["host"] for answer in answers])
        if not answers:
            raise OSError(f"the target {host} has no address")
        return answers

    async def addresses(self, host: str, port: int) -> Sequence[IPv4Address | IPv6Address]:
        """The addresses of a name or of an address itself. Raises as `resolve`."""
        try:
            read = read_host(host)
        except MalformedTarget as error:
            raise TargetRefused(f"the target's URL {error}") from None
        if not isinstance(read, HostName):
            self.rules.check(host, port)
            return [read]
        return [read_address(answer["host"]) for answer in await self.resolve(host, port)]

    async def grpc_target(self, url: str) -> GrpcTarget:
        """What a channel to a `grpc:` or `grpcs:` URL is opened with. Raises as `resolve`.

        A channel keeps its addresses for as long as it lives; who wants to follow a name opens another one.
        """
        wrong = next(self.rules.violations(url, "url"), None)
        if wrong is not None:
            raise TargetRefused(f"the target's URL {wrong.description}")
        place = read_url(url)
        addresses = await self.addresses(place.host_text, place.port)
        # One channel speaks one family; the resolver's first answer is the one that the machine prefers.
        family = "ipv4" if addresses[0].version == 4 else "ipv6"
        chosen = [str(address) for address in addresses if address.version == addresses[0].version]
        places = ",".join(f"{each}:{place.port}" if family == "ipv4" else f"[{each}]:{place.port}" for each in chosen)
        options = (("grpc.default_authority", place.authority), ("grpc.enable_http_proxy", 0))
        return GrpcTarget(f"{family}:{places}", options, place.scheme == "grpcs")

    async def close(self) -> None:
        """Lets go of the resolver."""
        await self._resolver.close()


def refusal_of(error: BaseException) -> TargetRefused | None:
    """The refusal in what aiohttp raises for it (a ClientConnectorDNSError, which is a ClientConnectorError), or None."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    return cause if isinstance(cause, TargetRefused) else None
