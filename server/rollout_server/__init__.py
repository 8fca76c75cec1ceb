"""Runs agent rollouts for the reinforcement learning of language models, and knows who wrote every token.

What authors of agents need is here; `rollout_server.calculator` is an example.
"""

from __future__ import annotations

try:
    from rollout_server.agent import Agent
    from rollout_server.core.limits import Limits
    from rollout_server.core.outcome import RewardResult
    from rollout_server.runtime.agent_protocol import Request
    from rollout_server.runtime.errors import ToolError
    from rollout_server.runtime.run.messages import Reply
    from rollout_server.runtime.run.run import Run
    from rollout_server.tool import Image, tool
except ModuleNotFoundError as error:  # the base install is a client's
    missing = error.name

    def __getattr__(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        text = f'{missing} is not installed: pip install "rollout-server[server]" (in a clone of it: pip install ".[server]")'
        raise ModuleNotFoundError(text, name=missing)


__all__ = [
    "Agent",
    "Image",
    "Limits",
    "Reply",
    "Request",
    "RewardResult",
    "Run",
    "ToolError",
    "__version__",
    "serve",
    "tool",
]

__version__ = "0.1.0"


def serve(*agents: Agent, **settings: object) -> None:
    """Serves agents until the process is told to stop; the first one is the default. The settings are those of `rollout serve`."""
    from rollout_server import app  # authors and their tests need no server, and it takes a second to load

    app.serve(*agents, **settings)
