"""Settings of tools: threads, processes and output size."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings

from rollout_server.settings.types import env_names


class ToolSettings(BaseSettings):
    """Threads, processes and output size of tools."""

    tool_threads: int = Field(
        64,
        ge=1,
        validation_alias=env_names("ROLLOUT_TOOL_THREADS"),
        description="Maximum threads for synchronous tools, including timed-out calls that have not returned.",
    )
    tool_processes: int = Field(
        0,
        ge=0,
        validation_alias=env_names("ROLLOUT_TOOL_PROCESSES"),
        description="Maximum processes for tools that run in one; 0: the number of CPUs, at least 2.",
    )
    tool_output_bytes: int = Field(
        1024 * 1024,
        ge=1024,
        validation_alias=env_names("ROLLOUT_TOOL_OUTPUT_BYTES"),
        description="Maximum size in bytes of a tool result; the rest is cut.",
    )
    toolset_seconds: float = Field(
        60.0,
        gt=0,
        validation_alias=env_names("ROLLOUT_TOOLSET_SECONDS"),
        description="Time limit of a tool call in seconds, for toolsets that requests name (spec.tools).",
    )
    toolset_calls: int = Field(
        64,
        ge=1,
        validation_alias=env_names("ROLLOUT_TOOLSET_CALLS"),
        description="Maximum concurrent calls of one toolset (MCP server or ToolService), over all rollouts; further calls wait.",
    )
