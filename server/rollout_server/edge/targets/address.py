"""IP addresses: which are reserved, which are loopback, and which IPv4 address an IPv6 address embeds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import TypeAlias

Address: TypeAlias = "IPv4Address | IPv6Address"
Network: TypeAlias = "IPv4Network | IPv6Network"

# Prefixes that gateways translate to the IPv4 address in the last 32 bits: RFC 6052, 8215, 2765.
_TRANSLATED = (IPv6Network("64:ff9b::/96"), IPv6Network("64:ff9b:1::/48"), IPv6Network("::ffff:0:0:0/96"))
_COMPATIBLE = IPv6Network("::/96")
_RESERVED: tuple[Network, ...] = tuple(
    ip_network(text)
    for text in (
        # Link-local: cloud metadata services return a machine's credentials here.
        *("169.254.0.0/16", "fe80::/10"),
        # Multicast and broadcast.
        *("224.0.0.0/4", "ff00::/8", "255.255.255.255/32"),
        # Cloud metadata services outside link-local: EC2, Google, Scaleway, Azure, Oracle, Alibaba.
        *("fd00:ec2::/32", "fd20:ce::254/128", "fd00:42::42/128"),
        *("168.63.129.16/32", "192.0.0.192/32", "100.100.100.200/32"),
    )
)
# A connection to an address of "this host" (0.0.0.0, ::) reaches the local machine, too.
_LOOPBACK: tuple[Network, ...] = tuple(ip_network(text) for text in ("::1/128", "::/128", "127.0.0.0/8", "0.0.0.0/8"))


def read_address(text: str) -> Address:
    """Parse an address. An IPv4-mapped IPv6 address becomes the IPv4 address. Raise ValueError."""
    address = ip_address(text)
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def is_within(address: Address, network: Network) -> bool:
    """Return whether a packet to `address` ends in `network`, directly or translated to IPv4 by a gateway."""
    return any(each in network for each in (address, *_translated(address)))


def reserved_by(address: Address) -> Network | None:
    """Return the reserved network that a packet to `address` can reach, directly or through a tunnel or gateway."""
    return _ends_in(address, _RESERVED)


def loopback_of(address: Address) -> Network | None:
    """Return the loopback network that a packet to `address` can reach, or None."""
    return _ends_in(address, _LOOPBACK)


def is_reserved(network: Network) -> bool:
    """Return whether all addresses of a network are reserved."""
    return any(is_part(network, reserved) for reserved in _RESERVED)


def is_part(network: Network, whole: Network) -> bool:
    """Return whether `network` is part of `whole`."""
    if isinstance(network, IPv4Network):
        return isinstance(whole, IPv4Network) and network.subnet_of(whole)
    return isinstance(whole, IPv6Network) and network.subnet_of(whole)


def _ends_in(address: Address, networks: Iterable[Network]) -> Network | None:
    reached = (address, *_translated(address), *_tunnelled(address))
    return next((network for network in networks if any(each in network for each in reached)), None)


def _translated(address: Address) -> Iterator[IPv4Address]:
    if any(address in network for network in _TRANSLATED):
        yield _last(address)


def _tunnelled(address: Address) -> Iterator[IPv4Address]:
    if not isinstance(address, IPv6Address):
        return
    if address in _COMPATIBLE:
        yield _last(address)
    if address.sixtofour is not None:
        yield address.sixtofour
    if address.teredo is not None:
        yield from address.teredo


def _last(address: Address) -> IPv4Address:
    return IPv4Address(int(address) & 0xFFFFFFFF)
