"""Errors of the earlier SDK."""

from __future__ import annotations

from collections.abc import Sequence


class OsmosisRolloutError(Exception):
    """Base class of all errors here. If an agent's `run` raises one, its text becomes the rollout's error message."""


class OsmosisTransportError(OsmosisRolloutError):
    """The trainer is not reachable, or the connection broke."""


class OsmosisServerError(OsmosisRolloutError):
    """The trainer returned 5xx, also after all retries. `status_code` is its last status."""

    def __init__(self, message: str, status_code: int) -> None:
        super().__init__(message)
        self.status_code = status_code


class OsmosisValidationError(OsmosisRolloutError):
    """The request is invalid: the trainer returned 4xx, or the request was not sent (then `status_code` is 400)."""

    def __init__(self, message: str, status_code: int) -> None:
        super().__init__(message)
        self.status_code = status_code


class OsmosisTimeoutError(OsmosisRolloutError):
    """The trainer did not respond in time."""


class AgentLoopNotFoundError(OsmosisRolloutError):
    """No agent loop with this `name` is registered; `available` lists the registered names."""

    def __init__(self, name: str, available: Sequence[str]) -> None:
        super().__init__(f"no agent loop {name!r} is registered; registered are {sorted(available)}")
        self.name = name
        self.available = list(available)


class ToolExecutionError(OsmosisRolloutError):
    """A tool failed. The id of the call and the name of the tool may be empty."""

    def __init__(self, message: str, tool_call_id: str = "", tool_name: str = "") -> None:
        super().__init__(message)
        self.tool_call_id = tool_call_id
        self.tool_name = tool_name


class ToolArgumentError(ToolExecutionError):
    """The arguments of a tool call are malformed."""
