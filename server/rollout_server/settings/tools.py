"""What tools may take of the server."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings

from rollout_server.settings.types import env_names


class ToolSettings(BaseSettings):
    """What tools may take of the server."""

    tool_threads: int = Field(
        64,
        ge=1,
        validation_alias=env_names("ROLLOUT_TOOL_THREADS"),
        description="Tools that are plain functions and run at the same time; those that were given up and never returned count.",
    )
    tool_processes: int = Field(
        0,
        ge=0,
        validation_alias=env_names("ROLLOUT_TOOL_PROCESSES"),
        description="Processes of tools that want one; 0: as many as there are processors, at least 2.",
    )
    tool_output_bytes: int = Field(
        1024 * 1024,
        ge=1024,
        validation_alias=env_names("ROLLOUT_TOOL_OUTPUT_BYTES"),
        description="Longest text of a tool's result; the rest is cut.",
    )
