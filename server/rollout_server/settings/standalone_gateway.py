"""Settings of `rollout gateway`, from flags, the environment and `.env`, in this order of precedence.

A setting that the rollout server also has keeps its name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from rollout_server.settings import names_of, read_settings
from rollout_server.settings.types import env_names


def _entries(value: object) -> object:
    """Split a text such as "ENTRY,ENTRY"; return any other value unchanged."""
    return tuple(entry.strip() for entry in value.split(",") if entry.strip()) if isinstance(value, str) else value


def _setting(name: str, default: Any, description: str, **bounds: Any) -> Any:
    """Return a field with one environment name."""
    return Field(default, validation_alias=env_names(name), description=description, **bounds)


class GatewayOptions(BaseSettings):
    """All settings of the standalone gateway."""

    model_config = SettingsConfigDict(env_file=".env", env_file_encoding="utf-8", extra="ignore", populate_by_name=True)

    servers: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_entries)] = _setting(
        "ROLLOUT_SERVERS",
        (),
        "A rollout server: HOST:PORT, grpc://HOST:PORT, grpcs://HOST:PORT or unix:PATH. Each must be a single process.",
    )
    host: str = _setting(
        "ROLLOUT_GATEWAY_HOST",
        "127.0.0.1",
        "Address to listen on; 0.0.0.0: all IPv4 addresses, for callers on other machines.",
    )
    port: int = _setting("ROLLOUT_GATEWAY_PORT", 9000, "HTTP port; 0: any.", ge=0, le=65535)
    tls_cert: Path | None = _setting("ROLLOUT_TLS_CERT", None, "Certificate chain (PEM) of the HTTP port.")
    tls_key: Path | None = _setting("ROLLOUT_TLS_KEY", None, "Private key (PEM) of ROLLOUT_TLS_CERT.")
    client_ca: Path | None = _setting(
        "ROLLOUT_TLS_CLIENT_CA",
        None,
        "CA certificates (PEM) for mutual TLS: HTTP clients must present a certificate signed by one of them.",
    )
    server_ca: Path | None = _setting(
        "ROLLOUT_SERVERS_CA",
        None,
        "CA certificates (PEM) for the servers, in place of the system's; also turns TLS on for HOST:PORT.",
    )
    server_cert: Path | None = _setting(
        "ROLLOUT_SERVERS_CERT", None, "Client certificate (PEM) for the servers; also turns TLS on for HOST:PORT."
    )
    server_key: Path | None = _setting("ROLLOUT_SERVERS_KEY", None, "Private key (PEM) of ROLLOUT_SERVERS_CERT.")
    server_name: str = _setting(
        "ROLLOUT_SERVERS_NAME", "", "Name in the servers' certificates, if it differs from the host of the address."
    )
    synchronous_key: SecretStr = _setting(
        "ROLLOUT_SYNCHRONOUS_KEY",
        SecretStr(""),
        "API key that the gateway sends to the servers for a POST /rollout or GET /tools without one.",
    )
    detach_grace_seconds: float = _setting(
        "ROLLOUT_DETACH_GRACE_SECONDS",
        10.0,
        "Time after which a POST /rollout whose client disconnected is cancelled; 0: at once.",
        ge=0,
    )
    max_metadata_bytes: int = _setting(
        "ROLLOUT_MAX_METADATA_BYTES", 1024 * 1024, "Maximum size of a rollout's metadata.", ge=0
    )
    max_request_bytes: int = _setting(
        "ROLLOUT_MAX_REQUEST_BYTES", 16 * 1024 * 1024, "Maximum size of a request body.", ge=1024
    )
    request_seconds: float = _setting("ROLLOUT_REQUEST_SECONDS", 60.0, "Timeout for receiving a request body.", gt=0)
    max_connections: int = _setting(
        "ROLLOUT_MAX_CONNECTIONS",
        10_000,
        "Maximum open HTTP connections, event streams included; requests on further ones get 503.",
        ge=1,
    )
    drain_seconds: float = _setting(
        "ROLLOUT_DRAIN_SECONDS", 30.0, "On SIGTERM, how long open requests may continue.", ge=0
    )
    log_format: Literal["text", "json"] = _setting(
        "ROLLOUT_LOG_FORMAT", "text", "Log format: lines of text, or one JSON object per line."
    )
    log_level: Literal["debug", "info", "warning", "error"] = _setting(
        "ROLLOUT_LOG_LEVEL", "info", "Minimum level of log lines."
    )

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if not self.servers:
            raise ValueError(f"{name_of('servers')} names no rollout server; set it to HOST:PORT, or pass --server")
        if len(set(self.servers)) != len(self.servers):
            raise ValueError(f"{name_of('servers')} names a rollout server twice")
        pairs = [("tls_cert", "tls_key"), ("tls_key", "tls_cert"), ("client_ca", "tls_cert")]
        pairs += [("server_cert", "server_key"), ("server_key", "server_cert")]
        for given, wanted in pairs:
            if getattr(self, given) is not None and getattr(self, wanted) is None:
                raise ValueError(f"{name_of(given)} is set, but {name_of(wanted)} is not")
        return self


def load_options(**flags: object) -> GatewayOptions:
    """Return the settings in force. Flags, by field name, take precedence. Raises `WrongSettings`."""
    return read_settings(GatewayOptions, flags)


def name_of(field: str) -> str:
    """Return the environment name of a setting."""
    return names_of(field, GatewayOptions)[0]
