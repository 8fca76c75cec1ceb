"""Hosts, ports and paths in URLs and rules.

Only spellings that all URL parsers read in the same way are accepted. Otherwise a check of the URL would prove nothing: one
library may parse a host as a name and another as an address, and a proxy may rewrite host or path.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from types import MappingProxyType

from rollout_server.edge.targets.address import Address, read_address

PORTS = MappingProxyType({"http": 80, "https": 443, "grpc": 80, "grpcs": 443})
"""The supported schemes and their default ports."""

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#]*)(.*)", re.DOTALL)
# Segments other than "", "." and "..". Escapes (%2e, %2f), backslashes and semicolons are excluded: some parsers decode them
# to "." or "/".
_PATH = re.compile(r"(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9._~!$&'()*+,=:@-]+)*/?")
_AUTHORITY = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(?::([0-9]*))?")
_LABEL = re.compile(r"[a-z0-9_-]{1,63}")
_PORT = re.compile(r"[0-9]{1,5}")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
LEAST_PORT, MOST_PORT = 1, 65535
LONGEST_URL = 2048


def url_host(host: str) -> str:
    """Return a host as URLs have it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


class MalformedTarget(ValueError):
    """A host or URL that is not accepted. The text describes the problem without repeating the URL."""


@dataclass(frozen=True, slots=True)
class HostName:
    """A DNS name in lower case, without a trailing dot."""

    text: str


@dataclass(frozen=True, slots=True)
class TargetAddress:
    """Scheme (lower case), host and port of a URL."""

    scheme: str
    host: HostName | Address
    port: int

    @property
    def host_text(self) -> str:
        """The host, without brackets."""
        return self.host.text if isinstance(self.host, HostName) else str(self.host)

    @property
    def authority(self) -> str:
        """Host and port as in a Host header."""
        return f"{url_host(self.host_text)}:{self.port}"


def read_url(url: str) -> TargetAddress:
    """Parse a base URL, to whose path the server appends others. Raise `MalformedTarget`."""
    if len(url) > LONGEST_URL:
        raise MalformedTarget(f"must have at most {LONGEST_URL} characters")
    parts = _URL.fullmatch(url)
    if parts is None:
        raise MalformedTarget(f"must be an absolute URL with one of the schemes {', '.join(PORTS)}")
    scheme, authority = parts[1].lower(), parts[2]
    if scheme not in PORTS:
        raise MalformedTarget(f"needs one of the schemes {', '.join(PORTS)}")
    if "@" in authority:
        raise MalformedTarget("must not hold a user name or password")
    split = _AUTHORITY.fullmatch(authority)
    if split is None:
        raise MalformedTarget("needs a host and an optional decimal port; IPv6 addresses need brackets")
    host = _bracketed(split[1][1:-1]) if split[1].startswith("[") else read_host(split[1])
    if "?" in parts[3] or "#" in parts[3]:
        raise MalformedTarget("must not have a query or a fragment, not even an empty one: remove '?' and '#'")
    if not _PATH.fullmatch(parts[3]):
        raise MalformedTarget(
            "needs a path of plain segments: ASCII letters, digits and -._~!$&'()*+,=:@ between single slashes, without escapes "
            "(%) and without segments '.' or '..'"
        )
    return TargetAddress(scheme, host, read_port(split[2]) if split[2] else PORTS[scheme])


def read_host(text: str) -> HostName | Address:
    """Parse a host without port: a name, or an address in its usual form. Raise `MalformedTarget`."""
    if ":" in text:
        return _bracketed(text)
    if not text.isascii():
        raise MalformedTarget("needs a host in ASCII; write international names in punycode (xn--...)")
    name = text.lower().removesuffix(".")
    labels = name.split(".")
    # As in the WHATWG URL standard: a numeric last label makes it an IPv4 address, which other libraries may read as octal or hex.
    if _NUMBER.fullmatch(labels[-1]):
        return _decimal(text)
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise MalformedTarget(
            "needs a host: labels of letters, digits, '-' and '_' with single dots between them, or an address"
        )
    return HostName(name)


def read_port(text: str) -> int:
    """Parse a decimal port. Raise `MalformedTarget`."""
    if not _PORT.fullmatch(text) or not LEAST_PORT <= int(text) <= MOST_PORT:
        raise MalformedTarget(f"needs a port from {LEAST_PORT} to {MOST_PORT}")
    return int(text)


def _bracketed(text: str) -> Address:
    if "%" in text:
        raise MalformedTarget("must not name a zone in its IPv6 address")
    try:
        IPv6Address(text)
    except ValueError:
        raise MalformedTarget("needs an IPv6 address in its brackets") from None
    return read_address(text)


def _decimal(text: str) -> Address:
    try:
        return IPv4Address(text)
    except ValueError:
        raise MalformedTarget("must write its IPv4 address as four decimal numbers, such as 192.0.2.1") from None
