"""Errors of a call for which no rollout is started.

A rollout that was accepted and then failed has an outcome instead (`core.outcome`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Violation:
    """One invalid field of a request: its path, such as `spec.messages[0].role`, and what to do about it."""

    field: str
    description: str


class RolloutError(Exception):
    """A call that the server refuses. `reason` is a stable word in capitals for programs, `message` a text for people.

    Neither may contain a secret, or data that belongs to another caller.
    """

    reason = "INTERNAL"

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        if reason is not None:
            self.reason = reason


class InvalidRequest(RolloutError):
    """Fields of the request are invalid; `violations` names each."""

    reason = "INVALID_REQUEST"

    def __init__(self, *violations: Violation) -> None:
        super().__init__("; ".join(f"{v.field}: {v.description}" for v in violations))
        self.violations = violations


class NotFound(RolloutError):
    """The named object does not exist, or belongs to another caller."""

    reason = "NOT_FOUND"


class Unauthenticated(RolloutError):
    """The call has no API key, or an unknown one."""

    reason = "KEY_NEEDED"


class Forbidden(RolloutError):
    """The caller's API key does not permit the call."""

    reason = "ADMIN_KEY_NEEDED"


class Conflict(RolloutError):
    """The request id was used before, with another payload."""

    reason = "REQUEST_ID_TAKEN"


class NotPossible(RolloutError):
    """The call is not possible in the current state of the server or of the rollout."""

    reason = "NOT_POSSIBLE"


class RolloutOver(NotPossible):
    """The rollout has ended, or is ending: its agent can call the model no more. `how` is a word for its end, if that is known."""

    reason = "ROLLOUT_OVER"

    def __init__(self, how: str = "") -> None:
        super().__init__(f"the rollout has ended{f' ({how})' if how else ''}; it takes no further calls")


class AlreadyFinished(Conflict):
    """The agent's work was ended before, with another result."""

    reason = "ALREADY_FINISHED"


class CallRefused(RolloutError):
    """A model call of an agent that is invalid or not supported. The rollout goes on.

    Args:
        reason: a stable word in capitals, such as ONE_CONVERSATION or CONTEXT_LENGTH_EXCEEDED.
        field: path of the field of `core.capture.call.ModelCall`, such as `messages[0].content`.
        text: what was wrong and what to do.
        tokens, maximum: for CONTEXT_LENGTH_EXCEEDED, the length of the prompt and of the longest one; 0 if unknown.
    """

    reason = "INVALID_CALL"

    def __init__(self, reason: str, field: str, text: str, *, tokens: int = 0, maximum: int = 0) -> None:
        super().__init__(text, reason=reason)
        self.field = field
        self.tokens = tokens
        self.maximum = maximum


class Superseded(RolloutError):
    """A newer call replaced this one."""

    reason = "STREAM_TAKEN"


class Gone(RolloutError):
    """The events after the given number are not available. `oldest` and `newest` are the sequence numbers that are."""

    reason = "EVENTS_GONE"

    def __init__(self, message: str, *, oldest: int, newest: int) -> None:
        super().__init__(message)
        self.oldest = oldest
        self.newest = newest


class OutOfRange(RolloutError):
    """A position in the request is beyond what there is so far."""

    reason = "OUT_OF_RANGE"


class Busy(RolloutError):
    """The server has no capacity at the moment. `retry_after` is in seconds."""

    reason = "TOO_MANY_ROLLOUTS"

    def __init__(self, message: str, *, retry_after: float, reason: str | None = None) -> None:
        super().__init__(message, reason=reason)
        self.retry_after = retry_after


class Unavailable(RolloutError):
    """The server accepts no new rollouts at the moment. `retry_after` is in seconds."""

    reason = "UNAVAILABLE"

    def __init__(self, message: str, *, retry_after: float, reason: str | None = None) -> None:
        super().__init__(message, reason=reason)
        self.retry_after = retry_after


class Draining(Unavailable):
    """The server is draining and accepts no new rollouts."""

    reason = "DRAINING"
