"""The errors that the runtime, agents, tools and the edge raise across their boundaries."""

from __future__ import annotations

from rollout_server.core.outcome import End, Failure


class RolloutFailed(Exception):
    """What was asked of the world failed, and with it the rollout. Classified once, where the failure crossed into our code."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class ToolError(Exception):
    """A tool's own error: its text goes to the model after "Error: ", and the rollout goes on."""


class ArgumentError(ToolError):
    """The arguments do not fit the tool: the model reads "Error: Invalid arguments for NAME: " and this text."""


class RolloutEnded(BaseException):
    """The rollout has come to its end: raised out of `play`, past any `except Exception` on the way. Let it pass."""

    def __init__(self, end: End) -> None:
        super().__init__(type(end).__name__)
        self.end = end


class AgentMistake(Exception):
    """The agent asked for something that makes no sense at this point."""
