"""The rollout as a tool in a process sees it: sent as JSON, and read-only, because changes would be lost."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextvars import Context
from dataclasses import dataclass
from typing import Any, NoReturn

from rollout_server.core.message import JSON
from rollout_server.runtime.errors import AgentMistake
from rollout_server.runtime.read_only import ReadDict, ReadList, read_only
from rollout_server.runtime.tools.protocols import ToolContext, ToolFailed

MOST_BYTES = 1024 * 1024
"""Maximum size of a rollout's state as JSON. The event loop serialises it, which takes about 10 ms for so much."""

_COPY = (
    "its process has a copy of the rollout's state and metadata, and changes to the copy would be lost; return what changed "
    "as the result, or remove process=True"
)
_NOT_JSON = (TypeError, ValueError, RecursionError)


class _CopiedList(ReadList):
    __slots__ = ()
    advice = _COPY


class _CopiedDict(ReadDict):
    __slots__ = ()
    advice = _COPY


@dataclass(frozen=True, slots=True)
class ProcessContext:
    """The `ToolContext` of a tool in a process. Anything but these attributes raises `AgentMistake`.

    Args:
        cancelled: always False, because the process is killed when the call is cancelled.
    """

    uid: str
    rollout_id: str
    metadata: Mapping[str, JSON]
    state: Mapping[str, Any]
    cancelled: bool = False

    @classmethod
    def parse(cls, text: str) -> ProcessContext:
        """Return the context that `context_json` wrote."""
        fields = json.loads(text)
        metadata, state = (read_only(fields[name], _CopiedDict, _CopiedList) for name in ("metadata", "state"))
        return cls(fields["uid"], fields["rollout_id"], metadata, state)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # Python looks for optional methods, for example to copy the object
            raise AttributeError(name)
        raise AgentMistake(
            f"its process cannot use `{name}` of the rollout, only uid, rollout_id, metadata, cancelled and a copy of state; do "
            "without it, or remove process=True"
        )


def context_json(tool: str, context: ToolContext) -> str:
    """Serialise a rollout for the process of this tool. Raise `ToolFailed` if JSON cannot hold its state."""
    # Read outside of the tool call: the process gets a copy, so the call does not count as one that may have changed the state.
    given = Context().run(lambda: context.state)
    try:
        state = json.dumps(given, allow_nan=False)
    except _NOT_JSON:
        raise _unsuitable(tool, _first_error(given)) from None
    if len(state) > MOST_BYTES:
        raise _unsuitable(tool, f"it has {len(state):,} bytes as JSON, at most {MOST_BYTES:,} can be sent")
    rest = json.dumps({"uid": context.uid, "rollout_id": context.rollout_id, "metadata": context.metadata})
    return f'{rest[:-1]}, "state": {state}}}'


def _unsuitable(tool: str, reason: str) -> ToolFailed:
    text = (
        f"tool {tool}: its process cannot get a copy of the rollout's state: {reason}; keep only JSON values in the state, or "
        "remove process=True"
    )
    return ToolFailed(text, "a rollout's state that cannot be sent to its process")


def _first_error(state: Mapping[str, Any]) -> str:
    for key, value in state.items():
        try:
            json.dumps({key: value}, allow_nan=False)
        except _NOT_JSON as error:
            return f"state[{key!r:.100}]: {error}"
    return "it changed meanwhile"
