"""Flags of commands that call a running server, and the client they need."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rollout_client import Client, Tls

API_KEY = "ROLLOUT_API_KEY"
NEAR = "localhost:50051"
_PORTS = "; does the server run, and is this its gRPC port (default 50051), not its HTTP port (default 9000)?"


@dataclass(frozen=True, slots=True)
class ConnectionFlags:
    """The server to call, and TLS settings.

    The API key is read from the environment: other users of the machine can read command lines.
    """

    server: Annotated[str | None, typer.Option(metavar="HOST:PORT", help=f"Server to call. Default: {NEAR}.")] = None
    tls_ca: Annotated[Path | None, typer.Option(help="CA certificates for the server's certificate (PEM).")] = None
    tls_certificate: Annotated[Path | None, typer.Option(help="Client certificate (PEM).")] = None
    tls_key: Annotated[Path | None, typer.Option(help="Private key of the client certificate (PEM).")] = None
    tls_name: Annotated[str, typer.Option(help="Name in the server's certificate, if it is not the host.")] = ""

    @contextmanager
    def connect(self) -> Iterator[Client]:
        """Yield a client. A call that fails within the block raises ValueError with one line of text."""
        from rollout_client import Client, Retry, RolloutError

        key = os.environ.get(API_KEY) or None
        try:
            with Client(self.server or NEAR, api_key=key, tls=self._tls(), retry=Retry(patience=2)) as client:
                yield client
        except RolloutError as error:
            hint = _PORTS if error.code.name == "UNAVAILABLE" else ""
            hint = f"; set {API_KEY} to your API key" if error.code.name == "UNAUTHENTICATED" and not key else hint
            raise ValueError(f"{error}{hint}") from None

    def _tls(self) -> Tls | None:
        from rollout_client import Tls

        if not (self.tls_ca or self.tls_certificate or self.tls_key or self.tls_name):
            return None
        return Tls(self.tls_ca, self.tls_certificate, self.tls_key, self.tls_name)
