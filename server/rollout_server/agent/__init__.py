"""What an author of an agent subclasses. `rollout_server` exports these names."""

from __future__ import annotations

from rollout_server.agent.base import Agent
from rollout_server.agent.environment import Environment, Step
from rollout_server.agent.judge import Judge, json_field, number_from, yes_or_no
from rollout_server.agent.rubric import Rubric

__all__ = ["Agent", "Environment", "Judge", "Rubric", "Step", "json_field", "number_from", "yes_or_no"]
