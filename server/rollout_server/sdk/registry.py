"""Agent loops by name. The earlier SDK has one registry for the process, and registries of one's own."""

from __future__ import annotations

import threading

from rollout_server.sdk.core.base import RolloutAgentLoop
from rollout_server.sdk.core.exceptions import AgentLoopNotFoundError


class AgentLoopRegistry:
    """Agent loops by name. Safe to use from several threads."""

    def __init__(self) -> None:
        self._loops: dict[str, RolloutAgentLoop] = {}
        self._lock = threading.Lock()

    def register(self, loop: RolloutAgentLoop) -> None:
        """Adds a loop under its name. Raises ValueError where the name is taken."""
        with self._lock:
            if loop.name in self._loops:
                raise ValueError(f"an agent loop {loop.name!r} is already registered; unregister it first")
            self._loops[loop.name] = loop

    def unregister(self, name: str) -> bool:
        """Removes a loop; False where there was none."""
        with self._lock:
            return self._loops.pop(name, None) is not None

    def get(self, name: str) -> RolloutAgentLoop | None:
        """The loop of that name, or None."""
        with self._lock:
            return self._loops.get(name)

    def list_names(self) -> list[str]:
        """All names, in the order in which they were registered."""
        with self._lock:
            return list(self._loops)

    def clear(self) -> None:
        """Removes all."""
        with self._lock:
            self._loops.clear()


_REGISTRY = AgentLoopRegistry()


def register_agent_loop(loop: RolloutAgentLoop) -> None:
    """Adds a loop to the process's registry. Raises ValueError where its name is taken."""
    _REGISTRY.register(loop)


def unregister_agent_loop(name: str) -> bool:
    """Removes a loop from it; False where there was none."""
    return _REGISTRY.unregister(name)


def get_agent_loop(name: str) -> RolloutAgentLoop:
    """The loop of that name. Raises `AgentLoopNotFoundError`, which lists those there are."""
    loop = _REGISTRY.get(name)
    if loop is None:
        raise AgentLoopNotFoundError(name, _REGISTRY.list_names())
    return loop


def list_agent_loops() -> list[str]:
    """The names in it."""
    return _REGISTRY.list_names()
