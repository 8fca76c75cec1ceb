"""What an author of an agent subclasses. `rollout_server` exports these names."""

from __future__ import annotations

from rollout_server.agent.base import Agent
from rollout_server.agent.environment import Environment, Step

__all__ = ["Agent", "Environment", "Step"]
