"""Parser of the rules for targets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from ipaddress import IPv6Network, ip_network

from rollout_server.edge.targets.address import Network
from rollout_server.edge.targets.host_port import LEAST_PORT, MOST_PORT, HostName, read_host, read_port

_ENTRY = re.compile(
    r"(?:\[(?P<inner>[^\[\]]*)\](?P<length>/[0-9]+)?|(?P<plain>[^:\[\]]*))"
    r"(?P<ports>:(?P<low>[0-9]+)(?:-(?P<high>[0-9]+))?)?"
)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: a name (with `wildcard`: the names below it) or a network, for the ports from `low` to `high`."""

    name: str = ""
    wildcard: bool = False
    network: Network | None = None
    low: int = LEAST_PORT
    high: int = MOST_PORT

    def has_port(self, port: int) -> bool:
        """Return whether the rule covers this port."""
        return self.low <= port <= self.high

    def has_name(self, name: str) -> bool:
        """Return whether the rule allows this name."""
        if self.wildcard:
            return name.endswith(f".{self.name}")
        return bool(self.name) and name == self.name


def entries(setting: str | Iterable[str]) -> Iterator[str]:
    """Split a comma-separated text, or strip the entries of a list; skip empty ones."""
    parts = setting.split(",") if isinstance(setting, str) else setting
    return (part.strip() for part in parts if part.strip())


def read_rule(entry: str) -> Rule:
    """Parse one rule. Raise a ValueError that quotes an invalid one."""
    try:
        return _read(entry)
    except ValueError as error:
        raise ValueError(f"{entry!r} is not a rule for targets: it {error}") from None


def _read(entry: str) -> Rule:
    parts = _ENTRY.fullmatch(entry)
    if parts is None:  # several colons without brackets: an IPv6 address or network
        return Rule(network=_network(entry))
    low, high = _ports(parts["low"], parts["high"])
    if parts["plain"] is None:
        if ":" not in parts["inner"]:
            raise ValueError("needs an IPv6 address in its brackets")
        return Rule(network=_network(parts["inner"] + (parts["length"] or "")), low=low, high=high)
    if "/" in parts["plain"]:
        return Rule(network=_network(parts["plain"]), low=low, high=high)
    wildcard = parts["plain"].startswith("*.")
    host = read_host(parts["plain"].removeprefix("*."))
    if isinstance(host, HostName):
        return Rule(host.text, wildcard, low=low, high=high)
    if wildcard:
        raise ValueError("needs a name after '*.'")
    return Rule(network=ip_network(host), low=low, high=high)


def _ports(low: str | None, high: str | None) -> tuple[int, int]:
    if low is None:
        return LEAST_PORT, MOST_PORT
    first, last = read_port(low), read_port(high or low)
    if first > last:
        raise ValueError("needs the lower port first")
    return first, last


def _network(text: str) -> Network:
    if "%" in text:
        raise ValueError("must not name a zone")
    try:
        network = ip_network(text)
    except ValueError as error:
        if "host bits" in str(error):
            raise ValueError("has bits set after its prefix length; write the network's first address") from None
        raise ValueError(
            "needs a name, an address or a network such as 10.0.0.0/8, optionally followed by a port or ports such as :8080 or "
            ":8080-8130; IPv6 with ports needs brackets"
        ) from None
    if isinstance(network, IPv6Network) and network.network_address.ipv4_mapped is not None:
        raise ValueError("is an IPv4 network written as an IPv6 one; write it as IPv4")
    return network
