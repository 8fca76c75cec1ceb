"""What an author of an agent subclasses. `rollout_server` exports these names."""

from __future__ import annotations

from rollout_server.agent.base import Agent
from rollout_server.agent.environment import Environment, Step
from rollout_server.agent.external import ExternalAgent
from rollout_server.agent.function import FunctionAgent, own_loop
from rollout_server.agent.judge import Judge, json_field, number_from, yes_or_no
from rollout_server.agent.program import Program, ProgramResult
from rollout_server.agent.rubric import Rubric

__all__ = [
    "Agent",
    "Environment",
    "ExternalAgent",
    "FunctionAgent",
    "Judge",
    "Program",
    "ProgramResult",
    "Rubric",
    "Step",
    "json_field",
    "number_from",
    "own_loop",
    "yes_or_no",
]
