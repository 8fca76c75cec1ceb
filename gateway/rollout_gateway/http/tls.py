"""TLS of the HTTP port, with certificates that are replaced while it listens.

A handshake looks up, at its beginning, the context that is then in force; so what is replaced is replaced at once and whole,
and connections that are open go on with what they began with. A context comes into force only after all its files were read
and found to fit together: a broken pair leaves the old one in place.
"""

import asyncio
import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

from rollout_gateway.pem_files import KeyPair, Watch, load_authorities, load_pair

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """What a port needs to speak TLS. With `client_ca` it serves only clients with a certificate of that authority."""

    pair: KeyPair
    client_ca: Path | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files."""
        return (self.pair.cert, self.pair.key, *([self.client_ca] if self.client_ca else []))


class Certificates:
    """The context of a listener. Raises ValueError, naming the file, where it cannot be made."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._watch = Watch(files.paths)
        self._current = _made(files)
        self.context = _blank(files)
        # Called for every handshake, also for those that name no server.
        self.context.sni_callback = self._choose

    async def watch(self, seconds: float = 1.0) -> None:
        """Looks at the files every few seconds, for ever."""
        while True:
            await asyncio.sleep(seconds)
            self.look()

    def look(self) -> None:
        """Takes the files if they have changed."""
        if not self._watch.changed():
            return
        try:
            self._current = _made(self._files)
        except ValueError as error:
            _LOG.error("the certificate in force is kept: %s", error)
        else:
            _LOG.info("the certificate was replaced by the one in %s", self._files.pair.cert)

    def _choose(self, connection: ssl.SSLSocket | ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        connection.context = self._current


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
