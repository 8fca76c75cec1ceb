"""TLS of the HTTP port, with certificates that are replaced while it listens.

A handshake looks up, at its beginning, the context that is then in force; so what is replaced is replaced at once and whole,
and connections that are open go on with what they began with.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path

from rollout_gateway.pem_files import KeyPair, Reloaded, load_authorities, load_pair


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """What a port needs to speak TLS. With `client_ca` it serves only clients with a certificate of that authority."""

    pair: KeyPair
    client_ca: Path | None = None


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """The context of a listener, which follows its files. Raises ValueError, naming the file, where it cannot be made."""
    paths = (files.pair.cert, files.pair.key, files.client_ca)
    current = Reloaded(paths, lambda: _made(files), f"the certificate in {files.pair.cert}")

    def choose(connection: ssl.SSLSocket | ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        current.look()
        connection.context = current.value

    context = _blank(files)
    # Called for every handshake, also for those that name no server.
    context.sni_callback = choose
    return context


def _made(files: TlsFiles) -> ssl.SSLContext:
    context = _blank(files)
    load_pair(context, files.pair)
    if files.client_ca is not None:
        load_authorities(context, files.client_ca)
    return context


def _blank(files: TlsFiles) -> ssl.SSLContext:
    """How connections are made, before it is said with which certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    # Renegotiation costs the server far more than the client that asks for it.
    context.options |= ssl.OP_NO_RENEGOTIATION
    if files.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        # Who resumes a connection is not asked for a certificate again, so an authority that is no longer trusted would be for
        # two hours. TLS 1.2 resumes even so, from a cache of OpenSSL's that Python cannot turn off.
        context.num_tickets = 0
    return context
