"""Settings of a gateway that runs alone: from flags, the environment and `.env`, in this order.

What a rollout server has too is named as it is there. Nothing slow is imported: the command line reads its flags from here.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AliasChoices, BeforeValidator, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict


class WrongOptions(ValueError):
    """Settings that cannot be used; the text names each by its environment name."""


def _entries(value: object) -> object:
    """Reads `ENTRY,ENTRY`."""
    return tuple(entry.strip() for entry in value.split(",") if entry.strip()) if isinstance(value, str) else value


def _named(name: str) -> AliasChoices:
    return AliasChoices(name)


class Options(BaseSettings):
    """Everything that can be set."""

    model_config = SettingsConfigDict(env_file=".env", env_file_encoding="utf-8", extra="ignore", populate_by_name=True)

    servers: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_entries)] = Field(
        (),
        validation_alias=_named("ROLLOUT_SERVERS"),
        description="A rollout server: HOST:PORT, grpc://HOST:PORT, grpcs://HOST:PORT or unix:PATH, each of them one process.",
    )
    host: str = Field(
        "127.0.0.1",
        validation_alias=_named("ROLLOUT_GATEWAY_HOST"),
        description="Address to listen on; 0.0.0.0: all of IPv4, for callers on other machines.",
    )
    port: int = Field(
        9000, ge=0, le=65535, validation_alias=_named("ROLLOUT_GATEWAY_PORT"), description="HTTP port; 0: any."
    )
    tls_cert: Path | None = Field(
        None, validation_alias=_named("ROLLOUT_TLS_CERT"), description="Certificate chain (PEM) of the HTTP port."
    )
    tls_key: Path | None = Field(None, validation_alias=_named("ROLLOUT_TLS_KEY"), description="Its private key (PEM).")
    client_ca: Path | None = Field(
        None,
        validation_alias=_named("ROLLOUT_TLS_CLIENT_CA"),
        description="CA certificates (PEM): HTTP clients must show a certificate of theirs.",
    )
    server_ca: Path | None = Field(
        None,
        validation_alias=_named("ROLLOUT_SERVERS_CA"),
        description="CA certificates (PEM) for the servers instead of the system's; also turns TLS on for HOST:PORT.",
    )
    server_cert: Path | None = Field(
        None,
        validation_alias=_named("ROLLOUT_SERVERS_CERT"),
        description="Certificate (PEM) to show to the servers; also turns TLS on for HOST:PORT.",
    )
    server_key: Path | None = Field(
        None, validation_alias=_named("ROLLOUT_SERVERS_KEY"), description="Its private key (PEM)."
    )
    server_name: str = Field(
        "",
        validation_alias=_named("ROLLOUT_SERVERS_NAME"),
        description="The name in the servers' certificates, where it is not the host of the address.",
    )
    synchronous_key: SecretStr = Field(
        SecretStr(""),
        validation_alias=_named("ROLLOUT_SYNCHRONOUS_KEY"),
        description="API key of the servers for POST /rollout and GET /tools without one.",
    )
    detach_grace_seconds: float = Field(
        10.0,
        ge=0,
        validation_alias=_named("ROLLOUT_DETACH_GRACE_SECONDS"),
        description="A POST /rollout whose client hung up is cancelled after this; 0: at once.",
    )
    max_metadata_bytes: int = Field(
        1024 * 1024,
        ge=0,
        validation_alias=_named("ROLLOUT_MAX_METADATA_BYTES"),
        description="Largest metadata of a rollout.",
    )
    max_request_bytes: int = Field(
        16 * 1024 * 1024,
        ge=1024,
        validation_alias=_named("ROLLOUT_MAX_REQUEST_BYTES"),
        description="Largest body of a request.",
    )
    request_seconds: float = Field(
        60.0,
        gt=0,
        validation_alias=_named("ROLLOUT_REQUEST_SECONDS"),
        description="How long the body of a request may take to arrive.",
    )
    max_connections: int = Field(
        10_000,
        ge=1,
        validation_alias=_named("ROLLOUT_MAX_CONNECTIONS"),
        description="Open HTTP connections, streams of events included; requests on more are answered with 503.",
    )
    drain_seconds: float = Field(
        30.0,
        ge=0,
        validation_alias=_named("ROLLOUT_DRAIN_SECONDS"),
        description="On SIGTERM, how long requests under way may go on.",
    )
    log_format: Literal["text", "json"] = Field(
        "text", validation_alias=_named("ROLLOUT_LOG_FORMAT"), description="One line of text or one JSON object."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", validation_alias=_named("ROLLOUT_LOG_LEVEL"), description="The least important lines that are written."
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


def load_options(**flags: object) -> Options:
    """The settings in force; flags by field name go first. Raises `WrongOptions`."""
    try:
        return Options(**flags)  # type: ignore[arg-type]
    except ValidationError as error:
        raise WrongOptions("; ".join(_complaint(each["loc"], each["msg"]) for each in error.errors())) from None


def name_of(field: str) -> str:
    """The environment name of a setting."""
    alias = Options.model_fields[field].validation_alias
    return str(alias.choices[0]) if isinstance(alias, AliasChoices) else field.upper()


def _complaint(loc: tuple[int | str, ...], message: str) -> str:
    place = str(loc[0]) if loc else ""
    message = message.removeprefix("Value error, ")
    return f"{name_of(place) if place in Options.model_fields else place}: {message}" if place else message
