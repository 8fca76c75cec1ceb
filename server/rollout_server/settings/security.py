"""Who may call, whom the server calls, and certificates."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings

from rollout_server.settings.types import Entries, env_names


class SecuritySettings(BaseSettings):
    """Who may call, whom the server calls, and certificates."""

    api_key: SecretStr | None = Field(
        None, validation_alias=env_names("ROLLOUT_API_KEY"), description='One key, for the caller "default".'
    )
    admin_key: SecretStr | None = Field(
        None,
        validation_alias=env_names("ROLLOUT_ADMIN_KEY"),
        description="A key that sees the rollouts of all callers.",
    )
    api_keys: Entries = Field(
        (),
        validation_alias=env_names("ROLLOUT_API_KEYS"),
        description="NAME sha256:HEX[ admin],...: keys by their hashes; `rollout keys new` makes one.",
    )
    api_keys_file: Path | None = Field(
        None,
        validation_alias=env_names("ROLLOUT_API_KEYS_FILE"),
        description="A file with such entries, one a line. It is read again when it changes.",
    )
    synchronous_needs_key: bool = Field(
        True,
        validation_alias=env_names("ROLLOUT_SYNCHRONOUS_NEEDS_KEY"),
        description="Where there are keys; false: POST /rollout and GET /tools, whose trainers send none, go without.",
    )
    targets: Entries = Field(
        (),
        validation_alias=env_names("ROLLOUT_TARGETS"),
        description="Hosts, *.domains and networks, each with an optional :PORT or :PORT-PORT, that requests may name; empty: all.",
    )
    target_schemes: Entries = Field(
        ("http", "https", "grpc", "grpcs"),
        validation_alias=env_names("ROLLOUT_TARGET_SCHEMES"),
        description="Schemes of URLs that requests may name.",
    )
    tls_cert: Path | None = Field(
        None, validation_alias=env_names("ROLLOUT_TLS_CERT"), description="Certificate chain (PEM) for gRPC and HTTP."
    )
    tls_key: Path | None = Field(
        None, validation_alias=env_names("ROLLOUT_TLS_KEY"), description="Its private key (PEM)."
    )
    tls_client_ca: Path | None = Field(
        None,
        validation_alias=env_names("ROLLOUT_TLS_CLIENT_CA"),
        description="CA certificates (PEM): clients must show a certificate of theirs.",
    )
    target_ca: Path | None = Field(
        None,
        validation_alias=env_names("ROLLOUT_TARGET_CA"),
        description="CA certificates (PEM) for https and grpcs targets, instead of the system's.",
    )
