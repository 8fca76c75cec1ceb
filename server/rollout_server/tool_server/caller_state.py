"""What the calls of one rollout share: the state of its tools, and the slots of its calls."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from rollout_server.core.error import Busy
from rollout_server.runtime.errors import ToolError
from rollout_server.runtime.tools.executor import ToolExecutor
from rollout_server.tool_server.limits import ToolServerLimits

_RETRY_SECONDS = 5.0
_DROPPED = (
    "The tool server no longer has the state of this rollout or session, which made no calls for too long. Its tools "
    "cannot be used further"
)


@dataclass(slots=True, eq=False)
class CallerState:
    """The state of one rollout, or of an MCP session without one.

    Args:
        executor: runs its calls, with the limits that tools have per rollout.
        state: the tools' own data about the rollout.
        calls: number of its running calls.
        until: time of the event loop at which it may be dropped.
    """

    executor: ToolExecutor
    state: dict[str, Any] = field(default_factory=dict)
    calls: int = 0
    until: float = 0.0


class CallerStates:
    """The states by rollout. Their number is limited.

    A state that stays empty is dropped after its last call, so callers that only use tools without state leave nothing. A caller
    whose state was not empty when it was dropped gets an error from then on: with a new state its tools would begin anew, and
    nobody would notice. It is remembered for that, up to a number of such callers.
    """

    def __init__(self, limits: ToolServerLimits, executor: Callable[[], ToolExecutor]) -> None:
        self._limit = limits.rollouts
        self._idle_seconds = limits.idle_seconds
        self._most_dropped = limits.dropped
        self._executor = executor
        # In the order of their last use.
        self._states: OrderedDict[Hashable, CallerState] = OrderedDict()
        self._dropped: OrderedDict[Hashable, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._states)

    def enter(self, owner: Hashable) -> CallerState:
        """Return the state of `owner` for one call, which ends with `leave`. None owns nothing: each call gets a new state.

        Raises `ToolError` if its state was dropped, and `Busy` if there are too many.
        """
        if owner is None:
            return CallerState(self._executor())
        self._drop_idle()
        if owner in self._dropped:
            raise ToolError(_DROPPED)
        state = self._states.get(owner)
        if state is None:
            if len(self._states) >= self._limit:
                text = f"the tool server keeps the state of {self._limit:,} rollouts, and has no room for another one"
                raise Busy(text, retry_after=_RETRY_SECONDS)
            state = self._states[owner] = CallerState(self._executor())
        self._states.move_to_end(owner)
        state.calls += 1
        return state

    def leave(self, owner: Hashable, state: CallerState) -> None:
        """End one call of a state."""
        if owner is None:
            return
        state.calls -= 1
        state.until = _now() + self._idle_seconds
        self._states.move_to_end(owner)
        if not state.calls and not state.state:
            del self._states[owner]

    def _drop_idle(self) -> None:
        now = _now()
        while self._states:
            owner, state = next(iter(self._states.items()))
            if state.calls:  # its last use is now
                state.until = now + self._idle_seconds
                self._states.move_to_end(owner)
            if state.until > now:
                return
            del self._states[owner]
            self._dropped[owner] = None
            if len(self._dropped) > self._most_dropped:
                self._dropped.popitem(last=False)


def _now() -> float:
    return asyncio.get_running_loop().time()
