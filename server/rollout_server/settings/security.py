"""Settings of security: API keys, allowed targets, and certificates."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings

from rollout_server.settings.types import Entries, env_names


class SecuritySettings(BaseSettings):
    """API keys of callers, allowed targets, and certificates."""

    api_key: SecretStr | None = Field(
        None, validation_alias=env_names("ROLLOUT_API_KEY"), description='A single API key, of the caller "default".'
    )
    admin_key: SecretStr | None = Field(
        None,
        validation_alias=env_names("ROLLOUT_ADMIN_KEY"),
        description="An API key with access to the rollouts of all callers.",
    )
    api_keys: Entries = Field(
        (),
        validation_alias=env_names("ROLLOUT_API_KEYS"),
        description="NAME sha256:HEX[ admin],...: API keys by their hashes; `rollout keys new` creates one.",
    )
    api_keys_file: Path | None = Field(
        None,
        validation_alias=env_names("ROLLOUT_API_KEYS_FILE"),
        description="A file of such entries, one per line. The server reloads it when it changes.",
    )
    synchronous_needs_key: bool = Field(
        True,
        validation_alias=env_names("ROLLOUT_SYNCHRONOUS_NEEDS_KEY"),
        description="On a server with API keys, false opens POST /rollout and GET /tools to callers without one, for trainers that "
        "cannot send it.",
    )
    targets: Entries = Field(
        (),
        validation_alias=env_names("ROLLOUT_TARGETS"),
        description="Allowed targets: hosts, *.domains and networks, each with an optional :PORT or :PORT-PORT; empty: all.",
    )
    target_schemes: Entries = Field(
        ("http", "https", "grpc", "grpcs"),
        validation_alias=env_names("ROLLOUT_TARGET_SCHEMES"),
        description="Allowed URL schemes of targets.",
    )
    tls_cert: Path | None = Field(
        None, validation_alias=env_names("ROLLOUT_TLS_CERT"), description="Certificate chain (PEM) for gRPC and HTTP."
    )
    tls_key: Path | None = Field(
        None, validation_alias=env_names("ROLLOUT_TLS_KEY"), description="Private key (PEM) of ROLLOUT_TLS_CERT."
    )
    tls_client_ca: Path | None = Field(
        None,
        validation_alias=env_names("ROLLOUT_TLS_CLIENT_CA"),
        description="CA certificates (PEM) for mutual TLS: clients must present a certificate signed by one of them.",
    )
    target_ca: Path | None = Field(
        None,
        validation_alias=env_names("ROLLOUT_TARGET_CA"),
        description="CA certificates (PEM) for https and grpcs targets, in place of the system's.",
    )
