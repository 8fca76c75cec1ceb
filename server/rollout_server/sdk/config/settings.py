"""Settings of the earlier SDK, with its environment names. If passed to `create_app`, they override those of `rollout config`."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class RolloutClientSettings(BaseSettings):
    """Timeouts, retries and connections of `OsmosisLLMClient`. Times in seconds."""

    model_config = SettingsConfigDict(env_prefix="OSMOSIS_ROLLOUT_CLIENT_", extra="ignore")

    timeout_seconds: float = Field(300.0, ge=1.0, le=3600.0)
    max_retries: int = Field(3, ge=0, le=10)
    complete_rollout_retries: int = Field(2, ge=0, le=10)
    retry_base_delay: float = Field(1.0, ge=0.1, le=60.0)
    retry_max_delay: float = Field(30.0, ge=1.0, le=300.0)
    max_connections: int = Field(100, ge=1, le=1000)
    max_keepalive_connections: int = Field(20, ge=1, le=100)


class RolloutServerSettings(BaseSettings):
    """Capacity and retention of a server of `create_app`. Times in seconds."""

    model_config = SettingsConfigDict(env_prefix="OSMOSIS_ROLLOUT_SERVER_", extra="ignore")

    max_concurrent_rollouts: int = Field(100, ge=1, le=10_000)
    record_ttl_seconds: float = Field(3600.0, ge=60.0, le=86_400.0)
    cleanup_interval_seconds: float = Field(60.0, ge=10.0, le=3600.0)


class RolloutSettings(BaseSettings):
    """All settings of the SDK."""

    model_config = SettingsConfigDict(env_prefix="OSMOSIS_ROLLOUT_", extra="ignore")

    client: RolloutClientSettings = Field(default_factory=RolloutClientSettings)
    server: RolloutServerSettings = Field(default_factory=RolloutServerSettings)
    max_metadata_size_bytes: int = Field(1024 * 1024, ge=1024, le=100 * 1024 * 1024)


class _InForce:
    """Holder of the settings passed to `configure`; None until then."""

    def __init__(self) -> None:
        self.chosen: RolloutSettings | None = None


_IN_FORCE = _InForce()


def get_settings() -> RolloutSettings:
    """Return the settings passed to `configure`, or else read the environment."""
    return RolloutSettings() if _IN_FORCE.chosen is None else _IN_FORCE.chosen


def configure(settings: RolloutSettings) -> None:
    """Set the settings for all clients and servers that this process creates later."""
    _IN_FORCE.chosen = settings


def reset_settings() -> None:
    """Discard the settings passed to `configure`."""
    _IN_FORCE.chosen = None


def chosen_settings() -> RolloutSettings | None:
    """Return the settings passed to `configure`, or None."""
    return _IN_FORCE.chosen
