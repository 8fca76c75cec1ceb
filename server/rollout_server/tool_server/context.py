"""The rollout as a tool sees it that runs in a tool server."""

from __future__ import annotations

import inspect
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from random import Random
from typing import Any, NoReturn, TypeVar, cast

from rollout_server.core.message import JSON
from rollout_server.runtime.errors import AgentMistake
from rollout_server.runtime.tools.task import ToolTask

_T = TypeVar("_T", bound=JSON)
_log = logging.getLogger("rollout_server.tool")


class ServedContext:
    """The `ToolContext` of one call. Anything that only the rollout's own server has raises `AgentMistake`."""

    def __init__(self, uid: str, metadata: Mapping[str, JSON], state: dict[str, Any]) -> None:
        self.uid = uid
        self.rollout_id = ""
        """Always empty: a tool server does not learn the id that the rollout's caller gave."""
        self.metadata = metadata
        self.state = state
        self.cancelled = False
        self.logger = logging.LoggerAdapter(_log, {"rollout_uid": uid} if uid else {})

    def now(self) -> datetime:
        """Return the time in UTC. Nothing is recorded: the rollout records the results of calls."""
        return datetime.now(UTC)

    def random(self) -> Random:
        """Return a new random generator."""
        return Random(secrets.randbits(53))  # noqa: S311 - for tools, not for secrets

    async def once(self, function: Callable[[], _T | Awaitable[_T]]) -> _T:
        """Call a function and return its result as parsed from JSON. Raise `AgentMistake` if it is not JSON."""
        if inspect.iscoroutinefunction(function):
            result = await function()
        else:
            result = await ToolTask("once").in_thread(function)
            if inspect.isawaitable(result):
                result = await result
        try:
            return cast("_T", json.loads(json.dumps(result, allow_nan=False)))
        except (TypeError, ValueError, RecursionError) as error:
            raise AgentMistake(f"once: the function's result cannot be serialized as JSON: {error}") from error

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # Python looks for optional methods, for example to copy the object
            raise AttributeError(name)
        raise AgentMistake(
            f"a tool server cannot use `{name}` of the rollout, which runs on another server; do without it, or give the tool to "
            "the agent itself"
        )
