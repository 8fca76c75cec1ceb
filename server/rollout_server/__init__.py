"""Run agent rollouts for reinforcement learning of language models, with the author of every token recorded.

This module exports the names that authors of agents need. `rollout_server.calculator` is a complete example agent.
"""

from __future__ import annotations

import os

# uvloop starts programs by a fork, in which gRPC's fork handlers run: they crash the child, or close connections of this process.
# gRPC reads the variable when it is imported, so here is the only place that is early enough.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

try:
    from rollout_server.agent import (
        Agent,
        Environment,
        ExternalAgent,
        FunctionAgent,
        Judge,
        Program,
        ProgramResult,
        Rubric,
        Step,
        json_field,
        number_from,
        own_loop,
        yes_or_no,
    )
    from rollout_server.core.capture.rules import AuxiliaryRule, CaptureOptions
    from rollout_server.core.limits import Limits
    from rollout_server.core.outcome import RewardResult
    from rollout_server.runtime.agent_protocol import Request
    from rollout_server.runtime.errors import ModelFailed, ToolError
    from rollout_server.runtime.run.messages import Reply
    from rollout_server.runtime.run.run import Run
    from rollout_server.runtime.tools.protocols import ToolContext
    from rollout_server.tool import Image, mcp, tool
except ModuleNotFoundError as error:  # the base install has only what the client needs, such as no pydantic
    missing = error.name

    def __getattr__(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        text = f'{missing} is not installed: pip install "rollout-server[server]" (in a clone of it: pip install ".[server]")'
        raise ModuleNotFoundError(text, name=missing)


__all__ = [
    "Agent",
    "AuxiliaryRule",
    "CaptureOptions",
    "Environment",
    "ExternalAgent",
    "FunctionAgent",
    "Image",
    "Judge",
    "Limits",
    "ModelFailed",
    "Program",
    "ProgramResult",
    "Reply",
    "Request",
    "RewardResult",
    "Rubric",
    "Run",
    "Step",
    "ToolContext",
    "ToolError",
    "__version__",
    "json_field",
    "mcp",
    "number_from",
    "own_loop",
    "serve",
    "tool",
    "yes_or_no",
]

__version__ = "0.1.0"


def serve(*agents: Agent, **settings: object) -> None:
    """Serve agents over gRPC and HTTP until SIGTERM or Ctrl-C. Blocks.

    Args:
        agents: at least one; a request that names no agent gets the first.
        settings: settings by field name, such as `grpc_port=50051`; they take precedence over the environment. `rollout config`
            lists all.

    Raises:
        WrongSettings: for an unknown setting or a value that cannot be used; a subclass of ValueError.
        AgentFailed: if an agent's `start` raises; a subclass of RuntimeError.
        RuntimeError, OSError: if a port cannot be opened.
    """
    # Imported late: it takes a second, and writing or testing an agent does not need it.
    from rollout_server import serving

    serving.serve(*agents, **settings)
