"""Limits of a tool server. A call over one of them is refused, and may be repeated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolServerLimits:
    """Limits of one tool server.

    Args:
        calls: calls that run or wait for a slot of their tool.
        rollouts: rollouts and MCP sessions with state.
        idle_seconds: the state of a rollout or session without calls for this time is dropped.
        dropped: rollouts and sessions whose dropped state is remembered. Beyond this number the oldest are forgotten.
        keys: call keys of finished calls. Beyond this number the oldest are forgotten.
        key_seconds: how long a finished call's result is returned for its key.
        key_bytes: total size of these results.
        orphan_seconds: how long a call runs on after all its callers have disconnected.
        message_bytes: size of a request.
        sessions: MCP sessions over HTTP.
        drain_seconds: how long running calls may go on at shutdown.
    """

    calls: int = 1000
    rollouts: int = 10_000
    idle_seconds: float = 3600.0
    dropped: int = 100_000
    keys: int = 100_000
    key_seconds: float = 600.0
    key_bytes: int = 256 * 1024 * 1024
    orphan_seconds: float = 10.0
    message_bytes: int = 4 * 1024 * 1024
    sessions: int = 10_000
    drain_seconds: float = 20.0
