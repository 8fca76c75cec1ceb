"""Settings of capacity: how many rollouts the server accepts, and how long it keeps them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings

from rollout_server.settings.types import env_names


class CapacitySettings(BaseSettings):
    """How many rollouts the server accepts, and how long it keeps them."""

    max_running: int = Field(
        100,
        ge=1,
        validation_alias=env_names(
            "ROLLOUT_MAX_RUNNING", "MAX_CONCURRENT_ROLLOUTS", "OSMOSIS_ROLLOUT_SERVER_MAX_CONCURRENT_ROLLOUTS"
        ),
        description="Maximum running rollouts; further ones are queued.",
    )
    max_queued: int = Field(
        10_000,
        ge=0,
        validation_alias=env_names("ROLLOUT_MAX_QUEUED"),
        description="Maximum queued rollouts; further ones are refused.",
    )
    max_active_bytes: int = Field(
        2**29,
        ge=1,
        validation_alias=env_names("ROLLOUT_MAX_ACTIVE_BYTES"),
        description="Approximate memory in bytes of rollouts that are queued, running or have an undelivered outcome; further "
        "rollouts are refused.",
    )
    max_running_per_caller: int | None = Field(
        None,
        ge=1,
        validation_alias=env_names("ROLLOUT_MAX_RUNNING_PER_CALLER"),
        description="Maximum running rollouts of one caller (API key); further ones are queued. Unset: ROLLOUT_MAX_RUNNING.",
    )
    max_queued_per_caller: int | None = Field(
        None,
        ge=0,
        validation_alias=env_names("ROLLOUT_MAX_QUEUED_PER_CALLER"),
        description="Maximum queued rollouts of one caller; further ones are refused. Unset: 90 % of ROLLOUT_MAX_QUEUED, or all "
        "of it on a server without API keys.",
    )
    max_active_bytes_per_caller: int | None = Field(
        None,
        ge=1,
        validation_alias=env_names("ROLLOUT_MAX_ACTIVE_BYTES_PER_CALLER"),
        description="ROLLOUT_MAX_ACTIVE_BYTES for the rollouts of one caller. Unset: 90 % of it, or all of it on a server without "
        "API keys.",
    )
    starts_per_minute_per_caller: int | None = Field(
        None,
        ge=1,
        validation_alias=env_names("ROLLOUT_STARTS_PER_MINUTE_PER_CALLER"),
        description="Rollouts that one caller may start per minute, also in one burst; further ones are refused. Unset: unlimited.",
    )
    timeout_seconds: float = Field(
        600.0,
        gt=0,
        validation_alias=env_names("ROLLOUT_TIMEOUT_SECONDS"),
        description="Time limit of a rollout of POST /rollout whose request sets none.",
    )
    max_seconds: float = Field(
        86_400.0,
        gt=0,
        le=1e9,
        validation_alias=env_names("ROLLOUT_MAX_SECONDS"),
        description="Maximum time limit of any rollout.",
    )
    record_ttl_seconds: float = Field(
        3600.0,
        gt=0,
        validation_alias=env_names("ROLLOUT_RECORD_TTL_SECONDS", "OSMOSIS_ROLLOUT_SERVER_RECORD_TTL_SECONDS"),
        description="How long a finished rollout is kept in memory.",
    )
    max_records: int = Field(
        10_000,
        ge=0,
        validation_alias=env_names("ROLLOUT_MAX_RECORDS"),
        description="Maximum finished rollouts in memory; the oldest are dropped first.",
    )
    max_record_bytes: int = Field(
        2**30,
        ge=0,
        validation_alias=env_names("ROLLOUT_MAX_RECORD_BYTES"),
        description="Approximate memory in bytes of finished rollouts; the oldest are dropped first.",
    )
    cleanup_seconds: float = Field(
        60.0,
        gt=0,
        validation_alias=env_names(
            "ROLLOUT_CLEANUP_INTERVAL_SECONDS", "OSMOSIS_ROLLOUT_SERVER_CLEANUP_INTERVAL_SECONDS"
        ),
        description="Interval at which finished rollouts are dropped.",
    )
    detach_grace_seconds: float = Field(
        10.0,
        ge=0,
        validation_alias=env_names("ROLLOUT_DETACH_GRACE_SECONDS"),
        description="Time after which a POST /rollout whose client disconnected is cancelled; 0: at once.",
    )
    on_drift: Literal["warn", "fail"] = Field(
        "warn",
        validation_alias=env_names("ROLLOUT_ON_DRIFT"),
        description="Policy on token drift if the request names none: warn records it, fail ends the rollout.",
    )
    max_metadata_bytes: int = Field(
        1024 * 1024,
        ge=0,
        validation_alias=env_names("ROLLOUT_MAX_METADATA_BYTES", "OSMOSIS_ROLLOUT_MAX_METADATA_SIZE_BYTES"),
        description="Maximum size of a rollout's metadata.",
    )
    max_request_bytes: int = Field(
        16 * 1024 * 1024,
        ge=1024,
        validation_alias=env_names("ROLLOUT_MAX_REQUEST_BYTES"),
        description="Maximum size of a request, HTTP and gRPC.",
    )
