"""How much the server takes on, and for how long."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings

from rollout_server.settings.types import env_names


class CapacitySettings(BaseSettings):
    """How much the server takes on, and for how long."""

    max_running: int = Field(
        100,
        ge=1,
        validation_alias=env_names(
            "ROLLOUT_MAX_RUNNING", "MAX_CONCURRENT_ROLLOUTS", "OSMOSIS_ROLLOUT_SERVER_MAX_CONCURRENT_ROLLOUTS"
        ),
        description="Rollouts that run at the same time; more wait.",
    )
    max_queued: int = Field(
        10_000,
        ge=0,
        validation_alias=env_names("ROLLOUT_MAX_QUEUED"),
        description="Rollouts that wait; more are refused.",
    )
    max_active_bytes: int = Field(
        2**29,
        ge=1,
        validation_alias=env_names("ROLLOUT_MAX_ACTIVE_BYTES"),
        description="Memory that rollouts may hold while they wait, run or have outcomes to deliver, counted roughly; more "
        "rollouts are refused.",
    )
    max_running_per_caller: int | None = Field(
        None,
        ge=1,
        validation_alias=env_names("ROLLOUT_MAX_RUNNING_PER_CALLER"),
        description="Rollouts of one caller (API key) that run at the same time; more wait. Unset: ROLLOUT_MAX_RUNNING.",
    )
    max_queued_per_caller: int | None = Field(
        None,
        ge=0,
        validation_alias=env_names("ROLLOUT_MAX_QUEUED_PER_CALLER"),
        description="Rollouts of one caller that wait; more are refused. Unset: nine tenths of ROLLOUT_MAX_QUEUED, or all of it "
        "where no keys are demanded.",
    )
    max_active_bytes_per_caller: int | None = Field(
        None,
        ge=1,
        validation_alias=env_names("ROLLOUT_MAX_ACTIVE_BYTES_PER_CALLER"),
        description="The same memory of one caller's rollouts. Unset: nine tenths of ROLLOUT_MAX_ACTIVE_BYTES, or all of it.",
    )
    starts_per_minute_per_caller: int | None = Field(
        None,
        ge=1,
        validation_alias=env_names("ROLLOUT_STARTS_PER_MINUTE_PER_CALLER"),
        description="Rollouts that one caller may start in a minute, all of them at once if it likes; more are refused. Unset: any "
        "number.",
    )
    timeout_seconds: float = Field(
        600.0,
        gt=0,
        validation_alias=env_names("ROLLOUT_TIMEOUT_SECONDS"),
        description="Time of a rollout of the synchronous dialect that asks for none.",
    )
    max_seconds: float = Field(
        86_400.0,
        gt=0,
        le=1e9,
        validation_alias=env_names("ROLLOUT_MAX_SECONDS"),
        description="Longest time of any rollout.",
    )
    record_ttl_seconds: float = Field(
        3600.0,
        gt=0,
        validation_alias=env_names("ROLLOUT_RECORD_TTL_SECONDS", "OSMOSIS_ROLLOUT_SERVER_RECORD_TTL_SECONDS"),
        description="How long a finished rollout is remembered.",
    )
    max_records: int = Field(
        10_000,
        ge=0,
        validation_alias=env_names("ROLLOUT_MAX_RECORDS"),
        description="Finished rollouts that are remembered.",
    )
    max_record_bytes: int = Field(
        2**30,
        ge=0,
        validation_alias=env_names("ROLLOUT_MAX_RECORD_BYTES"),
        description="Memory that finished rollouts may hold, counted roughly; the oldest are forgotten first.",
    )
    cleanup_seconds: float = Field(
        60.0,
        gt=0,
        validation_alias=env_names(
            "ROLLOUT_CLEANUP_INTERVAL_SECONDS", "OSMOSIS_ROLLOUT_SERVER_CLEANUP_INTERVAL_SECONDS"
        ),
        description="How often old records are dropped.",
    )
    detach_grace_seconds: float = Field(
        10.0,
        ge=0,
        validation_alias=env_names("ROLLOUT_DETACH_GRACE_SECONDS"),
        description="A POST /rollout whose client hung up is cancelled after this; 0: at once.",
    )
    on_drift: Literal["warn", "fail"] = Field(
        "warn",
        validation_alias=env_names("ROLLOUT_ON_DRIFT"),
        description="What token drift means where a request does not say.",
    )
    max_metadata_bytes: int = Field(
        1024 * 1024,
        ge=0,
        validation_alias=env_names("ROLLOUT_MAX_METADATA_BYTES", "OSMOSIS_ROLLOUT_MAX_METADATA_SIZE_BYTES"),
        description="Largest metadata of a rollout.",
    )
    max_request_bytes: int = Field(
        16 * 1024 * 1024,
        ge=1024,
        validation_alias=env_names("ROLLOUT_MAX_REQUEST_BYTES"),
        description="Largest request, HTTP and gRPC.",
    )
