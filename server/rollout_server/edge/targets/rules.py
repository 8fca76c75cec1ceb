"""The rules for targets: which hosts, ports and schemes a server may call.

What may be called is decided twice. When a request comes, its URLs are checked as they stand: scheme, port, and the host where it
is an address or no rule could ever allow its name. When a connection is made, the answers for the name are checked, and the
connection goes to exactly those addresses; so nobody gains by answering differently the second time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rollout_server.core.error import Violation
from rollout_server.edge.targets.address import Address, is_part, is_within, read_address, reserved_by
from rollout_server.edge.targets.entry import Rule, entries, read_rule
from rollout_server.edge.targets.host import PORTS, Name, Unclear, read_host, read_url

_NOT_ALLOWED = "this server's ROLLOUT_TARGETS do not allow"


class TargetRefused(OSError):
    """The rules do not allow a target. The text names host and address, and never the rest of the URL."""


@dataclass(frozen=True, slots=True)
class TargetRules:
    """Which targets may be called. Without rules all but reserved addresses are (link-local, multicast, broadcast, metadata).

    A name is allowed by a rule for names, or if all its addresses lie in listed networks. A reserved address is allowed only by a
    rule for that reserved network or a part of it: neither a name nor a larger network such as 0.0.0.0/0 means it.
    """

    rules: tuple[Rule, ...] = ()
    schemes: frozenset[str] = frozenset(PORTS)

    @classmethod
    def parse(cls, targets: str | Sequence[str] = (), schemes: str | Sequence[str] = tuple(PORTS)) -> TargetRules:
        """Reads the two settings: rules and schemes, as lists or separated by commas. Raises ValueError naming a wrong entry.

        A rule is `name`, `*.name` (the names below it), an address or a network, and may end with `:port` or `:low-high`; IPv6
        then stands in brackets (`[2001:db8::]/32:443`).
        """
        rules = tuple(read_rule(entry) for entry in entries(targets))
        if not rules and targets and not (isinstance(targets, str) and targets.isspace()):
            raise ValueError(f"{targets!r} holds no rule for targets")
        chosen = [entry.lower() for entry in entries(schemes)]
        wrong = [scheme for scheme in chosen if scheme not in PORTS]
        if wrong or not chosen:
            raise ValueError(
                f"{(wrong[0] if wrong else schemes)!r} is no scheme of a target; there are {', '.join(PORTS)}"
            )
        return cls(rules, frozenset(chosen))

    def violations(self, url: str, where: str) -> Iterator[Violation]:
        """What of a URL the rules do not allow; `where` is its field. The URL is never repeated: it may hold a password."""
        try:
            place = read_url(url)
        except Unclear as error:
            yield Violation(where, str(error))
            return
        if place.scheme not in self.schemes:
            yield Violation(
                where, f"needs one of the schemes {', '.join(sorted(self.schemes))} (ROLLOUT_TARGET_SCHEMES)"
            )
        complaint = self._complaint(place.host, place.port)
        if complaint:
            yield Violation(where, complaint)

    def check(self, host: str, port: int) -> None:
        """Raises `TargetRefused` for a host and port that cannot be allowed, whatever the host resolves to."""
        complaint = self._complaint(_read(host), port)
        if complaint:
            raise TargetRefused(f"the target {host} {complaint}")

    def check_answers(self, host: str, port: int, addresses: Iterable[str]) -> None:
        """Raises `TargetRefused` if a single one of the addresses that `host` resolves to is not allowed at this port."""
        read = _read(host)
        for answer in addresses:
            try:
                address = read_address(answer)
            except ValueError:
                raise TargetRefused(f"the target {host} resolves to something that is not an address") from None
            if not self._allows(read, address, port):
                text = f"the target {host} resolves to {address}, which {_NOT_ALLOWED} at port {port}{_hint(address)}"
                raise TargetRefused(text)

    def _complaint(self, host: Name | Address, port: int) -> str:
        if not isinstance(host, Name):
            return (
                "" if self._allows(host, host, port) else f"names an address and port that {_NOT_ALLOWED}{_hint(host)}"
            )
        here = [rule for rule in self.rules if rule.has_port(port)]
        if not self.rules or any(rule.network is not None or rule.has_name(host.text) for rule in here):
            return ""
        return f"names a host and port that {_NOT_ALLOWED}"

    def _allows(self, host: Name | Address, address: Address, port: int) -> bool:
        here = [rule for rule in self.rules if rule.has_port(port)]
        networks = [rule.network for rule in here if rule.network is not None and is_within(address, rule.network)]
        reserved = reserved_by(address)
        if reserved is not None:
            return any(is_part(network, reserved) for network in networks)
        if not self.rules or networks:
            return True
        return isinstance(host, Name) and any(rule.has_name(host.text) for rule in here)


def _read(host: str) -> Name | Address:
    try:
        return read_host(host)
    except Unclear as error:
        raise TargetRefused(f"the target's URL {error}") from None


def _hint(address: Address) -> str:
    reserved = reserved_by(address)
    return f"; it is reserved, and only a rule for {reserved} or a part of it allows it" if reserved is not None else ""
