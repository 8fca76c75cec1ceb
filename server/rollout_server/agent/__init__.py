"""What an author of an agent subclasses. `rollout_server` exports these names."""

from __future__ import annotations

from rollout_server.agent.base import Agent

__all__ = ["Agent"]
