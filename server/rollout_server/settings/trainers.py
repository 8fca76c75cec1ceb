"""Settings of calls to trainers, delivery of outcomes, and trainer streams."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings

from rollout_server.settings.types import env_names


class TrainerSettings(BaseSettings):
    """Calls to trainers, retries, and delivery of outcomes."""

    trainer_timeout_seconds: float = Field(
        300.0,
        gt=0,
        validation_alias=env_names(
            "ROLLOUT_TRAINER_TIMEOUT_SECONDS", "HTTP_CLIENT_TIMEOUT", "OSMOSIS_ROLLOUT_CLIENT_TIMEOUT_SECONDS"
        ),
        description="Timeout of one completion request.",
    )
    trainer_connections: int = Field(
        10_000,
        ge=1,
        validation_alias=env_names("ROLLOUT_TRAINER_CONNECTIONS", "OSMOSIS_ROLLOUT_CLIENT_MAX_CONNECTIONS"),
        description="Maximum open connections to trainers.",
    )
    retries: int = Field(
        3,
        ge=0,
        le=100,
        validation_alias=env_names("ROLLOUT_RETRIES", "OSMOSIS_ROLLOUT_CLIENT_MAX_RETRIES"),
        description="Maximum retries of a completion request after 5xx, timeouts and lost connections; not for POST /rollout.",
    )
    retry_base_seconds: float = Field(
        1.0,
        ge=0,
        validation_alias=env_names("ROLLOUT_RETRY_BASE_SECONDS", "OSMOSIS_ROLLOUT_CLIENT_RETRY_BASE_DELAY"),
        description="Delay before the first retry of a completion request or an outcome delivery; it doubles with each retry.",
    )
    retry_max_seconds: float = Field(
        30.0,
        ge=0,
        validation_alias=env_names("ROLLOUT_RETRY_MAX_SECONDS", "OSMOSIS_ROLLOUT_CLIENT_RETRY_MAX_DELAY"),
        description="Maximum delay between two retries.",
    )
    retry_after_seconds: float = Field(
        300.0,
        ge=0,
        validation_alias=env_names("ROLLOUT_RETRY_AFTER_SECONDS"),
        description="Maximum total wait for a trainer that refuses a completion with 429 or 503 and Retry-After (gRPC: RetryInfo), "
        "within the rollout's time limit. With POST /rollout only the rollout's time limit applies.",
    )
    delivery_seconds: float = Field(
        3600.0,
        gt=0,
        validation_alias=env_names("ROLLOUT_DELIVERY_SECONDS"),
        description="How long the server tries to deliver an outcome that is not acknowledged.",
    )
    delivery_retries: int | None = Field(
        None,
        ge=0,
        validation_alias=env_names("ROLLOUT_DELIVERY_RETRIES", "OSMOSIS_ROLLOUT_CLIENT_COMPLETE_ROLLOUT_RETRIES"),
        description="Maximum retries of an outcome delivery; unset: limited by ROLLOUT_DELIVERY_SECONDS only.",
    )
    delivery_timeout_seconds: float = Field(
        60.0,
        gt=0,
        validation_alias=env_names("ROLLOUT_DELIVERY_TIMEOUT_SECONDS"),
        description="Timeout of one delivery attempt.",
    )


class StreamSettings(BaseSettings):
    """Streams of trainers that connect as clients."""

    stream_grace_seconds: float = Field(
        30.0,
        ge=0,
        le=86_400,
        validation_alias=env_names("ROLLOUT_STREAM_GRACE_SECONDS"),
        description=(
            "How long a disconnected trainer stream may be resumed, and rollouts wait for their trainer after a restart; "
            "after that they fail when they next need it."
        ),
    )
    max_streams: int = Field(
        1000,
        ge=0,
        validation_alias=env_names("ROLLOUT_MAX_STREAMS"),
        description="Maximum trainer streams, disconnected ones included; 0: streams are refused.",
    )
    max_streams_of_caller: int = Field(
        100,
        ge=1,
        validation_alias=env_names("ROLLOUT_MAX_STREAMS_OF_CALLER"),
        description="Maximum trainer streams per caller (API key).",
    )
    stream_rollouts: int = Field(
        10_000,
        ge=1,
        validation_alias=env_names("ROLLOUT_STREAM_ROLLOUTS"),
        description="Maximum rollouts per stream without an acknowledged outcome; further ones are refused.",
    )
    stream_unacknowledged: int = Field(
        1024,
        ge=1,
        validation_alias=env_names("ROLLOUT_STREAM_UNACKNOWLEDGED"),
        description="Maximum unacknowledged items per stream; further ones wait.",
    )
