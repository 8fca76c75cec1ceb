"""Where the server listens, how it stops and what it writes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings

from rollout_server.settings.types import env_names


class ServingSettings(BaseSettings):
    """Where the server listens, how it stops and what it writes."""

    host: str = Field(
        "127.0.0.1",
        validation_alias=env_names("ROLLOUT_SERVER_HOST"),
        description="Address to listen on, gRPC, HTTP and metrics; 0.0.0.0: all of IPv4, for callers on other machines.",
    )
    http_port: int = Field(
        9000, ge=0, le=65535, validation_alias=env_names("ROLLOUT_SERVER_PORT"), description="HTTP port; 0: any."
    )
    grpc_port: int = Field(
        50051, ge=0, le=65535, validation_alias=env_names("ROLLOUT_GRPC_PORT"), description="gRPC port; 0: any."
    )
    http: bool = Field(True, validation_alias=env_names("ROLLOUT_HTTP"), description="Serve the HTTP gateway.")
    drain_seconds: float = Field(
        30.0,
        ge=0,
        validation_alias=env_names("ROLLOUT_DRAIN_SECONDS"),
        description="On SIGTERM, how long rollouts may go on.",
    )
    calculator_delay_seconds: float = Field(
        0.0,
        ge=0,
        validation_alias=env_names("ROLLOUT_CALCULATOR_DELAY_SECONDS"),
        description="Slows the calculator down.",
    )
    log_format: Literal["text", "json"] = Field(
        "text", validation_alias=env_names("ROLLOUT_LOG_FORMAT"), description="One line of text or one JSON object."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info",
        validation_alias=env_names("ROLLOUT_LOG_LEVEL"),
        description="The least important lines that are written.",
    )
    loop_block_seconds: float = Field(
        0.1,
        ge=0,
        validation_alias=env_names("ROLLOUT_LOOP_BLOCK_SECONDS"),
        description="Code that holds the event loop longer is logged with its stack; 0: nobody looks.",
    )
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        validation_alias=env_names("ROLLOUT_METRICS_PORT"),
        description="A port of its own for GET /metrics, open to everybody who reaches it; unset: only the HTTP port has it.",
    )
    max_connections: int = Field(
        10_000,
        ge=1,
        validation_alias=env_names("ROLLOUT_MAX_CONNECTIONS"),
        description="HTTP connections at the same time.",
    )
