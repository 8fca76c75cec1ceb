"""Errors that cross the boundaries between runtime, agents, tools and edge."""

from __future__ import annotations

from rollout_server.core.outcome import End, Failure


class RolloutFailed(Exception):
    """An external call failed, and the rollout fails with it.

    The failure is classified once, at the boundary where it occurred.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class PromptRefused(RolloutFailed):
    """The conversation cannot be shown to the model, for example because the chat template refuses it. Nothing was generated."""


class PromptTooLong(PromptRefused):
    """The conversation exceeds the model's context, so nothing was generated.

    Args:
        failure: the failure of a rollout that ends with it: VALIDATION, of the class POLICY.
        tokens: length of the prompt in tokens; None if the engine does not say it.
        maximum: length of the context in tokens; None if the engine does not say it.
    """

    def __init__(self, failure: Failure, tokens: int | None = None, maximum: int | None = None) -> None:
        super().__init__(failure)
        self.tokens = tokens
        self.maximum = maximum


class RequestRefused(PromptRefused):
    """The engine refused the request: its messages, a parameter or the engine's own configuration may be the cause.

    Once the engine has completed a turn of the rollout, its configuration is not.
    """


class LimitTooLarge(RolloutFailed):
    """The engine generates fewer tokens than `max_tokens` in one completion, so nothing was generated."""


class ModelFailed(RolloutFailed):
    """A further model returned no completion after all retries. An agent may catch it; otherwise its rollout fails with it."""


class RewardFailed(RolloutFailed):
    """A function of a rubric failed. Its text has the function's name, file and line."""


class ToolError(Exception):
    """A tool's own error. The model receives its text after "Error: ", and the rollout continues."""


class ArgumentError(ToolError):
    """The arguments do not fit the tool. The model receives "Error: Invalid arguments for NAME: " and this text."""


class RolloutEnded(BaseException):
    """The rollout has ended. Raised out of `play`; let it propagate.

    It derives from BaseException so that `except Exception` in an agent cannot swallow it (docs/design.md, D2).
    """

    def __init__(self, end: End) -> None:
        super().__init__(type(end).__name__)
        self.end = end


def cause_of(error: BaseException) -> BaseException:
    """Return the error that a group of errors stands for, such as one of an `asyncio.TaskGroup`; any other error as it is.

    It is the first `RolloutEnded` or `RolloutFailed` in the group, otherwise its first error.
    """
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [cause_of(each) for each in error.exceptions]
    return next((each for each in causes if isinstance(each, RolloutEnded | RolloutFailed)), causes[0])


class AgentMistake(Exception):
    """The agent called a method that is not valid at this point, or passed invalid arguments."""
