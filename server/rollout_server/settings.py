"""Settings: from flags, the environment and `.env`, in this order. The names of the reference implementations keep working."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AliasChoices, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

TOY = "toy"
"""The word for the tokenizer that comes with this package, where a setting wants a directory."""


def _named(*names: str) -> AliasChoices:
    return AliasChoices(*names)


def _pairs(value: object) -> object:
    """Reads `NAME=PATH,NAME=PATH`."""
    if not isinstance(value, str):
        return value
    pairs = [pair.split("=", 1) for pair in value.split(",") if pair.strip()]
    wrong = [pair[0] for pair in pairs if len(pair) < 2 or not all(pair)]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is not NAME=PATH")
    return {name.strip(): path.strip() for name, path in pairs}


Paths = Annotated[dict[str, Path], NoDecode, BeforeValidator(_pairs)]


class Settings(BaseSettings):
    """Everything that can be set. The first name of each is ours."""

    model_config = SettingsConfigDict(env_file=".env", env_file_encoding="utf-8", extra="ignore", populate_by_name=True)

    host: str = Field("0.0.0.0", validation_alias=_named("ROLLOUT_SERVER_HOST"), description="Address to listen on.")
    http_port: int = Field(
        9000, ge=0, le=65535, validation_alias=_named("ROLLOUT_SERVER_PORT"), description="HTTP port; 0: any."
    )
    grpc_port: int = Field(
        50051, ge=0, le=65535, validation_alias=_named("ROLLOUT_GRPC_PORT"), description="gRPC port; 0: any."
    )
    http: bool = Field(True, validation_alias=_named("ROLLOUT_HTTP"), description="Serve the HTTP gateway.")
    max_running: int = Field(
        100,
        ge=1,
        validation_alias=_named(
            "ROLLOUT_MAX_RUNNING", "MAX_CONCURRENT_ROLLOUTS", "OSMOSIS_ROLLOUT_SERVER_MAX_CONCURRENT_ROLLOUTS"
        ),
        description="Rollouts that run at the same time; more wait.",
    )
    max_queued: int = Field(
        10_000, ge=0, validation_alias=_named("ROLLOUT_MAX_QUEUED"), description="Rollouts that wait; more are refused."
    )
    timeout_seconds: float = Field(
        600.0,
        gt=0,
        validation_alias=_named("ROLLOUT_TIMEOUT_SECONDS"),
        description="Time of a rollout of the synchronous dialect that asks for none.",
    )
    max_seconds: float = Field(
        86_400.0, gt=0, validation_alias=_named("ROLLOUT_MAX_SECONDS"), description="Longest time of any rollout."
    )
    record_ttl_seconds: float = Field(
        3600.0,
        gt=0,
        validation_alias=_named("ROLLOUT_RECORD_TTL_SECONDS", "OSMOSIS_ROLLOUT_SERVER_RECORD_TTL_SECONDS"),
        description="How long a finished rollout is remembered.",
    )
    max_records: int = Field(
        10_000,
        ge=0,
        validation_alias=_named("ROLLOUT_MAX_RECORDS"),
        description="Finished rollouts that are remembered.",
    )
    max_record_bytes: int = Field(
        2**30,
        ge=0,
        validation_alias=_named("ROLLOUT_MAX_RECORD_BYTES"),
        description="Memory that finished rollouts may hold, counted roughly; the oldest are forgotten first.",
    )
    cleanup_seconds: float = Field(
        60.0,
        gt=0,
        validation_alias=_named("ROLLOUT_CLEANUP_INTERVAL_SECONDS", "OSMOSIS_ROLLOUT_SERVER_CLEANUP_INTERVAL_SECONDS"),
        description="How often old records are dropped.",
    )
    detach_grace_seconds: float = Field(
        10.0,
        ge=0,
        validation_alias=_named("ROLLOUT_DETACH_GRACE_SECONDS"),
        description="A POST /rollout whose client hung up is cancelled after this; 0: at once.",
    )
    drain_seconds: float = Field(
        30.0,
        ge=0,
        validation_alias=_named("ROLLOUT_DRAIN_SECONDS"),
        description="On SIGTERM, how long rollouts may go on.",
    )
    on_drift: Literal["warn", "fail"] = Field(
        "warn",
        validation_alias=_named("ROLLOUT_ON_DRIFT"),
        description="What token drift means where a request does not say.",
    )
    max_metadata_bytes: int = Field(
        1024 * 1024,
        ge=0,
        validation_alias=_named("ROLLOUT_MAX_METADATA_BYTES", "OSMOSIS_ROLLOUT_MAX_METADATA_SIZE_BYTES"),
        description="Largest metadata of a rollout.",
    )
    max_request_bytes: int = Field(
        64 * 1024 * 1024,
        ge=1024,
        validation_alias=_named("ROLLOUT_MAX_REQUEST_BYTES"),
        description="Largest request, HTTP and gRPC.",
    )
    trainer_timeout_seconds: float = Field(
        300.0,
        gt=0,
        validation_alias=_named(
            "ROLLOUT_TRAINER_TIMEOUT_SECONDS", "HTTP_CLIENT_TIMEOUT", "OSMOSIS_ROLLOUT_CLIENT_TIMEOUT_SECONDS"
        ),
        description="Time of one completion.",
    )
    trainer_connections: int = Field(
        10_000,
        ge=1,
        validation_alias=_named("ROLLOUT_TRAINER_CONNECTIONS", "OSMOSIS_ROLLOUT_CLIENT_MAX_CONNECTIONS"),
        description="Connections to trainers that are open at the same time.",
    )
    tokenizer_cache_size: int = Field(
        5, ge=1, validation_alias=_named("TOKENIZER_CACHE_SIZE"), description="Tokenizers that are kept in memory."
    )
    tokenizer_trust_remote_code: bool = Field(
        False,
        validation_alias=_named("TOKENIZER_TRUST_REMOTE_CODE"),
        description="Run code that comes with a tokenizer. Requests name tokenizers, so this lets callers run code here.",
    )
    tokenizers: Paths = Field(
        {},
        validation_alias=_named("ROLLOUT_TOKENIZERS"),
        description=f"NAME=DIRECTORY,...: where the tokenizers of these names are; the directory {TOY!r} is the built-in one.",
    )
    templates: Paths = Field(
        {},
        validation_alias=_named("ROLLOUT_TEMPLATES"),
        description="NAME=FILE,...: chat templates of these tokenizers.",
    )
    tokenizer_directories: bool = Field(
        False,
        validation_alias=_named("ROLLOUT_TOKENIZER_DIRECTORIES"),
        description="Requests may name local directories.",
    )
    tokenizers_offline: bool = Field(
        False, validation_alias=_named("ROLLOUT_TOKENIZERS_OFFLINE"), description="Never fetch a tokenizer."
    )
    calculator_delay_seconds: float = Field(
        0.0, ge=0, validation_alias=_named("ROLLOUT_CALCULATOR_DELAY_SECONDS"), description="Slows the calculator down."
    )
    log_format: Literal["text", "json"] = Field(
        "text", validation_alias=_named("ROLLOUT_LOG_FORMAT"), description="One line of text or one JSON object."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", validation_alias=_named("ROLLOUT_LOG_LEVEL"), description="The least important lines that are written."
    )


class WrongSettings(ValueError):
    """Settings that cannot be used; the text names each by its environment names."""


def load(**flags: object) -> Settings:
    """The settings in force; flags by field name go first. Raises `WrongSettings`."""
    try:
        return Settings(**flags)  # type: ignore[arg-type]
    except ValidationError as error:
        raise WrongSettings("; ".join(_complaint(e["loc"], e["msg"]) for e in error.errors())) from None


def names_of(field: str) -> list[str]:
    """The environment names of a setting, ours first."""
    alias = Settings.model_fields[field].validation_alias
    return [str(choice) for choice in alias.choices] if isinstance(alias, AliasChoices) else [field.upper()]


def _complaint(loc: tuple[int | str, ...], message: str) -> str:
    place = str(loc[0]) if loc else ""
    field = next((f for f in Settings.model_fields if place == f or place in names_of(f)), None)
    names = names_of(field) if field is not None else [place]
    also = f" ({', '.join(names[1:])})" if names[1:] else ""
    return f"{names[0]}{also}: {message}"
