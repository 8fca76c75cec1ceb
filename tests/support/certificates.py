"""Certificates of a test authority, in files."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path

import trustme
from rollout_gateway.certificate_files import KeyPair

HOSTS = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class Authority:
    """A certificate authority that issues certificates for this machine."""

    ca: trustme.CA = field(default_factory=trustme.CA)

    def put(self, folder: Path, name: str = "server", *, common_name: str | None = None) -> KeyPair:
        """Write a certificate and its key, or replace existing ones. Each file is replaced atomically."""
        pair = KeyPair(folder / f"{name}.pem", folder / f"{name}.key")
        issued = self.ca.issue_cert(*HOSTS, common_name=common_name or name)
        replace(pair.cert, b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        replace(pair.key, issued.private_key_pem.bytes())
        return pair

    def put_ca(self, folder: Path, name: str = "ca") -> Path:
        """Write the authority's own certificate."""
        path = folder / f"{name}.pem"
        replace(path, self.ca.cert_pem.bytes())
        return path

    def client(self, certificate_of: Authority | None = None) -> ssl.SSLContext:
        """A client context that trusts this authority, with a client certificate of this or another authority."""
        context = ssl.create_default_context()
        self.ca.configure_trust(context)
        if certificate_of is not None:
            certificate_of.ca.issue_cert("client@localhost").configure_cert(context)
        return context

    def server(self) -> ssl.SSLContext:
        """A context for an HTTP/2 server with a certificate of this authority."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.ca.issue_cert(*HOSTS).configure_cert(context)
        context.set_alpn_protocols(["h2"])
        return context


def replace(path: Path, content: bytes) -> None:
    """Replace a file atomically."""
    following = path.with_name(f".{path.name}")
    following.write_bytes(content)
    os.replace(following, path)
