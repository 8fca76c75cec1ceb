"""The earlier SDK's errors."""

from __future__ import annotations

from collections.abc import Sequence


class OsmosisRolloutError(Exception):
    """What all errors of this room are. Raised out of an agent's `run`, its text becomes the rollout's error message."""


class OsmosisTransportError(OsmosisRolloutError):
    """The trainer could not be reached, or the connection broke."""


class OsmosisServerError(OsmosisRolloutError):
    """The trainer answered 5xx, and went on doing so. `status_code` is its last status."""

    def __init__(self, message: str, status_code: int) -> None:
        super().__init__(message)
        self.status_code = status_code


class OsmosisValidationError(OsmosisRolloutError):
    """The request was wrong: the trainer answered 4xx, or nothing was sent (then `status_code` is 400)."""

    def __init__(self, message: str, status_code: int) -> None:
        super().__init__(message)
        self.status_code = status_code


class OsmosisTimeoutError(OsmosisRolloutError):
    """No answer came in time."""


class AgentLoopNotFoundError(OsmosisRolloutError):
    """No agent loop of that `name` is registered; `available` are those that are."""

    def __init__(self, name: str, available: Sequence[str]) -> None:
        super().__init__(f"no agent loop {name!r} is registered; there are {sorted(available)}")
        self.name = name
        self.available = list(available)


class ToolExecutionError(OsmosisRolloutError):
    """A tool failed. Which call and which tool it was may be empty."""

    def __init__(self, message: str, tool_call_id: str = "", tool_name: str = "") -> None:
        super().__init__(message)
        self.tool_call_id = tool_call_id
        self.tool_name = tool_name


class ToolArgumentError(ToolExecutionError):
    """The arguments of a tool call cannot be read."""
