"""Settings of the server process: addresses, shutdown and logs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings

from rollout_server.settings.types import env_names


class ServingSettings(BaseSettings):
    """Addresses, shutdown and logs of the server process."""

    host: str = Field(
        "127.0.0.1",
        validation_alias=env_names("ROLLOUT_SERVER_HOST"),
        description="Address on which gRPC, HTTP and metrics listen; 0.0.0.0: all IPv4 addresses, for callers on other machines.",
    )
    http_port: int = Field(
        9000, ge=0, le=65535, validation_alias=env_names("ROLLOUT_SERVER_PORT"), description="HTTP port; 0: any."
    )
    grpc_port: int = Field(
        50051, ge=0, le=65535, validation_alias=env_names("ROLLOUT_GRPC_PORT"), description="gRPC port; 0: any."
    )
    public_url: str | None = Field(
        None,
        pattern=r"^https?://[^\s?#]+$",
        validation_alias=env_names("ROLLOUT_PUBLIC_URL"),
        description="URL under which agents that run elsewhere reach the HTTP gateway; unset: that of this process's HTTP port.",
    )
    http: bool = Field(True, validation_alias=env_names("ROLLOUT_HTTP"), description="Serve the HTTP gateway.")
    workers: int = Field(
        1,
        ge=1,
        le=256,
        validation_alias=env_names("ROLLOUT_WORKERS"),
        description="Processes that serve the same ports; each has a journal of its own and its share of the limits.",
    )
    drain_seconds: float = Field(
        30.0,
        ge=0,
        validation_alias=env_names("ROLLOUT_DRAIN_SECONDS"),
        description="On SIGTERM, how long running rollouts may continue.",
    )
    calculator_delay_seconds: float = Field(
        0.0,
        ge=0,
        validation_alias=env_names("ROLLOUT_CALCULATOR_DELAY_SECONDS"),
        description="Delay of each tool call of the built-in calculator.",
    )
    log_format: Literal["text", "json"] = Field(
        "text",
        validation_alias=env_names("ROLLOUT_LOG_FORMAT"),
        description="Log format: lines of text, or one JSON object per line.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info",
        validation_alias=env_names("ROLLOUT_LOG_LEVEL"),
        description="Minimum level of log lines.",
    )
    loop_block_seconds: float = Field(
        0.1,
        ge=0,
        validation_alias=env_names("ROLLOUT_LOOP_BLOCK_SECONDS"),
        description="Code that blocks the main thread's event loop for longer is logged with its stack; 0: off.",
    )
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        validation_alias=env_names("ROLLOUT_METRICS_PORT"),
        description="A separate port for GET /metrics, without API key; unset: only the HTTP port serves it.",
    )
    max_connections: int = Field(
        10_000,
        ge=1,
        validation_alias=env_names("ROLLOUT_MAX_CONNECTIONS"),
        description="Maximum open HTTP connections.",
    )
