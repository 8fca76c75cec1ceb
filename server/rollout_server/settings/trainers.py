"""How trainers are called, how outcomes are delivered, and the streams of trainers that are only clients."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings

from rollout_server.settings.types import env_names


class TrainerSettings(BaseSettings):
    """How trainers are called and told."""

    trainer_timeout_seconds: float = Field(
        300.0,
        gt=0,
        validation_alias=env_names(
            "ROLLOUT_TRAINER_TIMEOUT_SECONDS", "HTTP_CLIENT_TIMEOUT", "OSMOSIS_ROLLOUT_CLIENT_TIMEOUT_SECONDS"
        ),
        description="Time of one completion.",
    )
    trainer_connections: int = Field(
        10_000,
        ge=1,
        validation_alias=env_names("ROLLOUT_TRAINER_CONNECTIONS", "OSMOSIS_ROLLOUT_CLIENT_MAX_CONNECTIONS"),
        description="Connections to trainers that are open at the same time.",
    )
    retries: int = Field(
        3,
        ge=0,
        le=100,
        validation_alias=env_names("ROLLOUT_RETRIES", "OSMOSIS_ROLLOUT_CLIENT_MAX_RETRIES"),
        description="How often a plain completion is asked for again after 5xx, timeouts and lost connections.",
    )
    retry_base_seconds: float = Field(
        1.0,
        ge=0,
        validation_alias=env_names("ROLLOUT_RETRY_BASE_SECONDS", "OSMOSIS_ROLLOUT_CLIENT_RETRY_BASE_DELAY"),
        description="The wait before the first repetition, of completions and of final callbacks; it doubles with each one.",
    )
    retry_max_seconds: float = Field(
        30.0,
        ge=0,
        validation_alias=env_names("ROLLOUT_RETRY_MAX_SECONDS", "OSMOSIS_ROLLOUT_CLIENT_RETRY_MAX_DELAY"),
        description="The longest wait between two repetitions.",
    )
    retry_after_seconds: float = Field(
        300.0,
        ge=0,
        validation_alias=env_names("ROLLOUT_RETRY_AFTER_SECONDS"),
        description="How long a completion is waited for that is refused with 429 or 503 and Retry-After (gRPC: RetryInfo), "
        "within the rollout's own time. POST /rollout waits for as long as the rollout has time.",
    )
    delivery_seconds: float = Field(
        3600.0,
        gt=0,
        validation_alias=env_names("ROLLOUT_DELIVERY_SECONDS"),
        description="How long an outcome is offered to a receiver that does not acknowledge it.",
    )
    delivery_retries: int | None = Field(
        None,
        ge=0,
        validation_alias=env_names("ROLLOUT_DELIVERY_RETRIES", "OSMOSIS_ROLLOUT_CLIENT_COMPLETE_ROLLOUT_RETRIES"),
        description="How often an outcome is offered again; unset: as often as there is time.",
    )
    delivery_timeout_seconds: float = Field(
        60.0, gt=0, validation_alias=env_names("ROLLOUT_DELIVERY_TIMEOUT_SECONDS"), description="Time of one delivery."
    )


class StreamSettings(BaseSettings):
    """Streams of trainers that are only clients."""

    stream_grace_seconds: float = Field(
        30.0,
        ge=0,
        le=86_400,
        validation_alias=env_names("ROLLOUT_STREAM_GRACE_SECONDS"),
        description="How long the stream of a trainer is kept after it was cut; then its rollouts fail as soon as they need it.",
    )
    max_streams: int = Field(
        1000,
        ge=0,
        validation_alias=env_names("ROLLOUT_MAX_STREAMS"),
        description="Streams of trainers at the same time, the cut ones among them; 0: none.",
    )
    max_streams_of_caller: int = Field(
        100,
        ge=1,
        validation_alias=env_names("ROLLOUT_MAX_STREAMS_OF_CALLER"),
        description="The same of one caller.",
    )
    stream_rollouts: int = Field(
        10_000,
        ge=1,
        validation_alias=env_names("ROLLOUT_STREAM_ROLLOUTS"),
        description="Rollouts of one stream whose outcomes are not acknowledged; more are refused.",
    )
    stream_unacknowledged: int = Field(
        1024,
        ge=1,
        validation_alias=env_names("ROLLOUT_STREAM_UNACKNOWLEDGED"),
        description="Items that are sent on a stream and not acknowledged; the next ones wait.",
    )
