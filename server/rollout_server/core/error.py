"""Errors of the plane on which a call fails and no rollout starts.

A rollout that was accepted and then went wrong is an outcome instead (`core.outcome`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Violation:
    """One field of a request that is wrong: its path in the request (`spec.messages[0].role`) and what to do about it."""

    field: str
    description: str


class RolloutError(Exception):
    """A call that was refused. `reason` is a stable word in capitals, the text is for a person.

    Neither may hold a secret or anything that is not the caller's.
    """

    reason = "INTERNAL"

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        if reason is not None:
            self.reason = reason


class InvalidRequest(RolloutError):
    """Fields of the request are wrong, each is named."""

    reason = "INVALID_REQUEST"

    def __init__(self, *violations: Violation) -> None:
        super().__init__("; ".join(f"{v.field}: {v.description}" for v in violations))
        self.violations = violations


class NotFound(RolloutError):
    """What the request names does not exist, or is not the caller's."""

    reason = "NOT_FOUND"


class Unauthenticated(RolloutError):
    """The call came without a key, or with one that is not known."""

    reason = "KEY_NEEDED"


class Forbidden(RolloutError):
    """The caller's key does not allow it."""

    reason = "ADMIN_KEY_NEEDED"


class Conflict(RolloutError):
    """The request id is known with another payload."""

    reason = "REQUEST_ID_TAKEN"


class NotPossible(RolloutError):
    """The state of the server or of the rollout does not allow the call."""

    reason = "NOT_POSSIBLE"


class Superseded(RolloutError):
    """Another call took the place of this one."""

    reason = "STREAM_TAKEN"


class Gone(RolloutError):
    """The events after the given number are not there. `oldest` and `newest` are the sequence numbers that are."""

    reason = "EVENTS_GONE"

    def __init__(self, message: str, *, oldest: int, newest: int) -> None:
        super().__init__(message)
        self.oldest = oldest
        self.newest = newest


class Busy(RolloutError):
    """There is no room at the moment. `retry_after` is in seconds."""

    reason = "TOO_MANY_ROLLOUTS"

    def __init__(self, message: str, *, retry_after: float, reason: str | None = None) -> None:
        super().__init__(message, reason=reason)
        self.retry_after = retry_after


class Draining(RolloutError):
    """The server stops and takes no new rollouts. `retry_after` is in seconds."""

    reason = "DRAINING"

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after
