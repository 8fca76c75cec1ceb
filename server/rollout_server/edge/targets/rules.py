"""The rules for targets: which hosts, ports and schemes a server may call.

They are checked twice. When a request arrives, its URLs are checked: scheme, port, and a host that is an address or a name that
no rule can allow. When a connection is opened, the addresses that DNS returned are checked, and the connection uses exactly
those. A name that resolves differently the second time gains nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rollout_server.core.error import Violation
from rollout_server.edge.targets.address import (
    Address,
    is_part,
    is_reserved,
    is_within,
    loopback_of,
    read_address,
    reserved_by,
)
from rollout_server.edge.targets.host_port import PORTS, HostName, MalformedTarget, read_host, read_url
from rollout_server.edge.targets.rule_parser import Rule, entries, read_rule

_NOT_ALLOWED = "this server's ROLLOUT_TARGETS do not allow"
_RESERVED_KINDS = "link-local, cloud metadata, multicast or broadcast"


class TargetRefused(OSError):
    """The rules do not allow a target. The text names host and address, never the rest of the URL."""


@dataclass(frozen=True, slots=True)
class TargetRules:
    """The rules for targets. Without rules, all addresses but reserved ones are allowed.

    A name is allowed by a rule for names, or if all its addresses are in allowed networks. Reserved addresses (link-local,
    cloud metadata, multicast, broadcast) are never allowed. If `loopback` is false, a loopback address is allowed only by a
    rule for the loopback network or a part of it; names and larger networks such as 0.0.0.0/0 do not allow it.
    """

    rules: tuple[Rule, ...] = ()
    schemes: frozenset[str] = frozenset(PORTS)
    loopback: bool = True

    @classmethod
    def parse(
        cls, targets: str | Sequence[str] = (), schemes: str | Sequence[str] = tuple(PORTS), *, loopback: bool = True
    ) -> TargetRules:
        """Parse both settings: rules and schemes, as lists or comma-separated. Raise ValueError that quotes a wrong entry.

        A rule is `name`, `*.name` (the names below it), an address or a network, optionally followed by `:port` or `:low-high`.
        IPv6 with ports needs brackets (`[2001:db8::]/32:443`).
        """
        rules = tuple(read_rule(entry) for entry in entries(targets))
        if not rules and targets and not (isinstance(targets, str) and targets.isspace()):
            raise ValueError(f"{targets!r} contains no rule for targets")
        useless = next((rule.network for rule in rules if rule.network is not None and is_reserved(rule.network)), None)
        if useless is not None:
            raise ValueError(f"{useless} is reserved ({_RESERVED_KINDS}) and never called, so no rule can allow it")
        chosen = [entry.lower() for entry in entries(schemes)]
        wrong = [scheme for scheme in chosen if scheme not in PORTS]
        if wrong or not chosen:
            raise ValueError(
                f"{(wrong[0] if wrong else schemes)!r} is not a scheme of a target; use {', '.join(PORTS)}"
            )
        return cls(rules, frozenset(chosen), loopback)

    def violations(self, url: str, where: str) -> Iterator[Violation]:
        """Yield the rules' violations by a URL; `where` is its field. The URL is not repeated: it may contain a password."""
        try:
            target = read_url(url)
        except MalformedTarget as error:
            yield Violation(where, str(error))
            return
        if target.scheme not in self.schemes:
            yield Violation(
                where, f"needs one of the schemes {', '.join(sorted(self.schemes))} (ROLLOUT_TARGET_SCHEMES)"
            )
        reason = self._reason_against(target.host, target.port)
        if reason:
            yield Violation(where, reason)

    def check(self, host: str, port: int) -> None:
        """Raise `TargetRefused` for a host and port that are not allowed whatever the host resolves to."""
        reason = self._reason_against(_read(host), port)
        if reason:
            raise TargetRefused(f"the target {host} {reason}")

    def check_addresses(self, host: str, port: int, addresses: Iterable[str]) -> None:
        """Raise `TargetRefused` if any of the addresses that `host` resolves to is not allowed at this port."""
        read = _read(host)
        for text in addresses:
            try:
                address = read_address(text)
            except ValueError:
                raise TargetRefused(f"the target {host} resolves to something that is not an address") from None
            if not self._allows(read, address, port):
                raise TargetRefused(f"the target {host} resolves to {address}, which {self._reason(address, port)}")

    def _reason_against(self, host: HostName | Address, port: int) -> str:
        if not isinstance(host, HostName):
            return "" if self._allows(host, host, port) else f"names an address that {self._reason(host, port)}"
        here = [rule for rule in self.rules if rule.has_port(port)]
        if not self.rules or any(rule.network is not None or rule.has_name(host.text) for rule in here):
            return ""
        return f"names a host and port that {_NOT_ALLOWED}"

    def _allows(self, host: HostName | Address, address: Address, port: int) -> bool:
        if reserved_by(address) is not None:
            return False
        here = [rule for rule in self.rules if rule.has_port(port)]
        networks = [rule.network for rule in here if rule.network is not None and is_within(address, rule.network)]
        own = None if self.loopback else loopback_of(address)
        if own is not None:
            return any(is_part(network, own) for network in networks)
        if not self.rules or networks:
            return True
        return isinstance(host, HostName) and any(rule.has_name(host.text) for rule in here)

    def _reason(self, address: Address, port: int) -> str:
        """Return why an address is not allowed at a port, and what would allow it."""
        if reserved_by(address) is not None:
            return f"is reserved ({_RESERVED_KINDS}) and never called"
        own = None if self.loopback else loopback_of(address)
        if own is not None:
            return (
                "is this machine's own (loopback), which a server that listens on other addresses calls only if ROLLOUT_TARGETS "
                f"lists {own} or a part of it, at port {port}"
            )
        return f"{_NOT_ALLOWED} at port {port}"


def _read(host: str) -> HostName | Address:
    try:
        return read_host(host)
    except MalformedTarget as error:
        raise TargetRefused(f"the target's URL {error}") from None
