"""Settings of a gateway that runs alone: from flags, the environment and `.env`, in this order.

What a rollout server has too is named as it is there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from rollout_server.settings import names_of, read_settings
from rollout_server.settings.types import env_names


def _entries(value: object) -> object:
    """Splits a text such as "ENTRY,ENTRY" into its entries; any other value is returned as it is."""
    return tuple(entry.strip() for entry in value.split(",") if entry.strip()) if isinstance(value, str) else value


def _setting(name: str, default: Any, description: str, **bounds: Any) -> Any:
    """A setting with its name in the environment."""
    return Field(default, validation_alias=env_names(name), description=description, **bounds)


class GatewayOptions(BaseSettings):
    """Everything that can be set."""

    model_config = SettingsConfigDict(env_file=".env", env_file_encoding="utf-8", extra="ignore", populate_by_name=True)

    servers: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_entries)] = _setting(
        "ROLLOUT_SERVERS",
        (),
        "A rollout server: HOST:PORT, grpc://HOST:PORT, grpcs://HOST:PORT or unix:PATH, each of them one process.",
    )
    host: str = _setting(
        "ROLLOUT_GATEWAY_HOST",
        "127.0.0.1",
        "Address to listen on; 0.0.0.0: all of IPv4, for callers on other machines.",
    )
    port: int = _setting("ROLLOUT_GATEWAY_PORT", 9000, "HTTP port; 0: any.", ge=0, le=65535)
    tls_cert: Path | None = _setting("ROLLOUT_TLS_CERT", None, "Certificate chain (PEM) of the HTTP port.")
    tls_key: Path | None = _setting("ROLLOUT_TLS_KEY", None, "Its private key (PEM).")
    client_ca: Path | None = _setting(
        "ROLLOUT_TLS_CLIENT_CA", None, "CA certificates (PEM): HTTP clients must show a certificate of theirs."
    )
    server_ca: Path | None = _setting(
        "ROLLOUT_SERVERS_CA",
        None,
        "CA certificates (PEM) for the servers instead of the system's; also turns TLS on for HOST:PORT.",
    )
    server_cert: Path | None = _setting(
        "ROLLOUT_SERVERS_CERT", None, "Certificate (PEM) to show to the servers; also turns TLS on for HOST:PORT."
    )
    server_key: Path | None = _setting("ROLLOUT_SERVERS_KEY", None, "Its private key (PEM).")
    server_name: str = _setting(
        "ROLLOUT_SERVERS_NAME", "", "The name in the servers' certificates, where it is not the host of the address."
    )
    synchronous_key: SecretStr = _setting(
        "ROLLOUT_SYNCHRONOUS_KEY", SecretStr(""), "API key of the servers for POST /rollout and GET /tools without one."
    )
    detach_grace_seconds: float = _setting(
        "ROLLOUT_DETACH_GRACE_SECONDS",
        10.0,
        "A POST /rollout whose client hung up is cancelled after this; 0: at once.",
        ge=0,
    )
    max_metadata_bytes: int = _setting(
        "ROLLOUT_MAX_METADATA_BYTES", 1024 * 1024, "Largest metadata of a rollout.", ge=0
    )
    max_request_bytes: int = _setting(
        "ROLLOUT_MAX_REQUEST_BYTES", 16 * 1024 * 1024, "Largest body of a request.", ge=1024
    )
    request_seconds: float = _setting(
        "ROLLOUT_REQUEST_SECONDS", 60.0, "How long the body of a request may take to arrive.", gt=0
    )
    max_connections: int = _setting(
        "ROLLOUT_MAX_CONNECTIONS",
        10_000,
        "Open HTTP connections, streams of events included; requests on more are answered with 503.",
        ge=1,
    )
    drain_seconds: float = _setting(
        "ROLLOUT_DRAIN_SECONDS", 30.0, "On SIGTERM, how long requests under way may go on.", ge=0
    )
    log_format: Literal["text", "json"] = _setting("ROLLOUT_LOG_FORMAT", "text", "One line of text or one JSON object.")
    log_level: Literal["debug", "info", "warning", "error"] = _setting(
        "ROLLOUT_LOG_LEVEL", "info", "The least important lines that are written."
    )

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if not self.servers:
            raise ValueError(f"{name_of('servers')} names no rollout server")
        if len(set(self.servers)) != len(self.servers):
            raise ValueError(f"{name_of('servers')} names a rollout server twice")
        pairs = [("tls_cert", "tls_key"), ("tls_key", "tls_cert"), ("client_ca", "tls_cert")]
        pairs += [("server_cert", "server_key"), ("server_key", "server_cert")]
        for given, wanted in pairs:
            if getattr(self, given) is not None and getattr(self, wanted) is None:
                raise ValueError(f"{name_of(given)} is set, but {name_of(wanted)} is not")
        return self


def load_options(**flags: object) -> GatewayOptions:
    """The settings in force; flags by field name go first. Raises `WrongSettings`."""
    return read_settings(GatewayOptions, flags)


def name_of(field: str) -> str:
    """The environment name of a setting."""
    return names_of(field, GatewayOptions)[0]
