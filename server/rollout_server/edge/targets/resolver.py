"""DNS lookup that returns only addresses allowed by the rules for targets.

aiohttp and gRPC connect to the returned addresses and do not look up the name again. A DNS server therefore cannot pass the
check with one address and redirect the connection to another (DNS rebinding).
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
    """Arguments for opening a gRPC channel. The target contains addresses only, so gRPC does not look up the name again.

    The options keep the URL's host name for `:authority` and the check of the server's certificate, and disable proxies.
    """

    target: str
    options: tuple[tuple[str, str | int], ...]
    secure: bool


class CheckedLookup(AbstractResolver):
    """The resolver for aiohttp's connector and for gRPC targets. Create it on the event loop that uses it.

    aiohttp does not call it for hosts that are addresses; `TargetRules.violations` has checked those.
    """

    def __init__(self, rules: TargetRules, resolver: AbstractResolver | None = None) -> None:
        self.rules = rules
        self._resolver = resolver or aiohttp.DefaultResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the addresses of a name. Raise `TargetRefused`, and OSError if there are none."""
        self.rules.check(host, port)
        answers = await self._resolver.resolve(host, port, family)
        self.rules.check_addresses(host, port, [answer["host"] for answer in answers])
        if not answers:
            raise OSError(f"the target {host} has no address")
        return answers

    async def addresses(self, host: str, port: int) -> Sequence[IPv4Address | IPv6Address]:
        """Return the addresses of a name, or the host itself if it is an address. Raise the errors of `resolve`."""
        try:
            read = read_host(host)
        except MalformedTarget as error:
            raise TargetRefused(f"the target's URL {error}") from None
        if not isinstance(read, HostName):
            self.rules.check(host, port)
            return [read]
        return [read_address(answer["host"]) for answer in await self.resolve(host, port)]

    async def grpc_target(self, url: str) -> GrpcTarget:
        """Return the arguments for a channel to a `grpc:` or `grpcs:` URL. Raise the errors of `resolve`.

        A channel keeps its addresses for its whole life; to follow DNS changes, open a new channel.
        """
        wrong = next(self.rules.violations(url, "url"), None)
        if wrong is not None:
            raise TargetRefused(f"the target's URL {wrong.description}")
        endpoint = read_url(url)
        addresses = await self.addresses(endpoint.host_text, endpoint.port)
        # A gRPC target has one address family. The resolver lists the machine's preferred family first.
        family = "ipv4" if addresses[0].version == 4 else "ipv6"
        chosen = [str(address) for address in addresses if address.version == addresses[0].version]
        host_ports = ",".join(
            f"{each}:{endpoint.port}" if family == "ipv4" else f"[{each}]:{endpoint.port}" for each in chosen
        )
        options = (("grpc.default_authority", endpoint.authority), ("grpc.enable_http_proxy", 0))
        return GrpcTarget(f"{family}:{host_ports}", options, endpoint.scheme == "grpcs")

    async def close(self) -> None:
        """Close the resolver."""
        await self._resolver.close()


def refusal_of(error: BaseException) -> TargetRefused | None:
    """Return the refusal inside aiohttp's exception (a ClientConnectorDNSError, a subclass of ClientConnectorError), or None."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    return cause if isinstance(cause, TargetRefused) else None
