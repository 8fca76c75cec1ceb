"""Streams of trainers that are only clients."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings

from rollout_server.settings.types import named


class StreamSettings(BaseSettings):
    """Streams of trainers that are only clients."""

    stream_grace_seconds: float = Field(
        30.0,
        ge=0,
        le=86_400,
        validation_alias=named("ROLLOUT_STREAM_GRACE_SECONDS"),
        description="How long the stream of a trainer is kept after it was cut; then its rollouts fail as soon as they need it.",
    )
    max_streams: int = Field(
        1000,
        ge=0,
        validation_alias=named("ROLLOUT_MAX_STREAMS"),
        description="Streams of trainers at the same time, the cut ones among them; 0: none.",
    )
    max_streams_of_caller: int = Field(
        100,
        ge=1,
        validation_alias=named("ROLLOUT_MAX_STREAMS_OF_CALLER"),
        description="The same of one caller.",
    )
    stream_rollouts: int = Field(
        10_000,
        ge=1,
        validation_alias=named("ROLLOUT_STREAM_ROLLOUTS"),
        description="Rollouts of one stream whose outcomes are not acknowledged; more are refused.",
    )
    stream_unacknowledged: int = Field(
        1024,
        ge=1,
        validation_alias=named("ROLLOUT_STREAM_UNACKNOWLEDGED"),
        description="Items that are sent on a stream and not acknowledged; the next ones wait.",
    )
