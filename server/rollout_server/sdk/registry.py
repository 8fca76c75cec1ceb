"""Registries of agent loops by name: one for the process, and any number of separate ones."""

from __future__ import annotations

import threading

from rollout_server.sdk.core.base import RolloutAgentLoop
from rollout_server.sdk.core.exceptions import AgentLoopNotFoundError


class AgentLoopRegistry:
    """Agent loops by name. Thread-safe."""

    def __init__(self) -> None:
        self._loops: dict[str, RolloutAgentLoop] = {}
        self._lock = threading.Lock()

    def register(self, loop: RolloutAgentLoop) -> None:
        """Add a loop under its name. Raises ValueError if the name is already registered."""
        with self._lock:
            if loop.name in self._loops:
                raise ValueError(f"an agent loop {loop.name!r} is already registered; unregister it first")
            self._loops[loop.name] = loop

    def unregister(self, name: str) -> bool:
        """Remove a loop. Return False if the name is not registered."""
        with self._lock:
            return self._loops.pop(name, None) is not None

    def get(self, name: str) -> RolloutAgentLoop | None:
        """Return the loop with this name, or None."""
        with self._lock:
            return self._loops.get(name)

    def list_names(self) -> list[str]:
        """Return all names in order of registration."""
        with self._lock:
            return list(self._loops)

    def clear(self) -> None:
        """Remove all loops."""
        with self._lock:
            self._loops.clear()


_REGISTRY = AgentLoopRegistry()


def register_agent_loop(loop: RolloutAgentLoop) -> None:
    """Add a loop to the process's registry. Raises ValueError if its name is already registered."""
    _REGISTRY.register(loop)


def unregister_agent_loop(name: str) -> bool:
    """Remove a loop from the process's registry. Return False if the name is not registered."""
    return _REGISTRY.unregister(name)


def get_agent_loop(name: str) -> RolloutAgentLoop:
    """Return the loop with this name. Raises `AgentLoopNotFoundError`, which lists the registered names."""
    loop = _REGISTRY.get(name)
    if loop is None:
        raise AgentLoopNotFoundError(name, _REGISTRY.list_names())
    return loop


def list_agent_loops() -> list[str]:
    """Return all names in the process's registry."""
    return _REGISTRY.list_names()
