"""The policy that generates the completions of rollouts, as trainers announce it: its newest step, and pauses of sampling.

A trainer announces for a scope: one of its streams, or the rollouts that call one of its endpoints, or all of them. Each rollout
has a `SamplingGate`, to which its scope's announcements are copied. Whatever sends a completion request waits at the gate
immediately before, so that neither new turns nor retries leave during a pause.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Final

from rollout_server.core.error import InvalidRequest, Violation

LONGEST_VERSION: Final = 256
"""Maximum length of a policy version in characters."""


@dataclass(frozen=True, slots=True)
class PolicyUpdate:
    """An announcement.

    Args:
        version: the trainer's name of the policy; empty: not changed.
        step: its step; later policies have larger ones. None: not changed.
        paused: whether no further completions are requested.
    """

    version: str = ""
    step: int | None = None
    paused: bool = False


@dataclass(frozen=True, slots=True)
class AnnouncedPolicy:
    """What was announced for one scope so far. `step` is None as long as no announcement had one."""

    step: int | None = None
    paused: bool = False

    def updated(self, by: PolicyUpdate, *, unused: bool = False) -> AnnouncedPolicy:
        """Return a copy with an announcement applied. Raise `InvalidRequest`.

        `unused`: the scope has no unfinished rollouts, so that the step may decrease.
        """
        wrong = [*_violations(by)]
        if not unused and by.step is not None and self.step is not None and 0 <= by.step < self.step:
            text = (
                f"is {by.step}, but {self.step} was announced before; "
                "a step must not decrease while rollouts are unfinished"
            )
            wrong.append(Violation("policy.step", text))
        if wrong:
            raise InvalidRequest(*wrong)
        return AnnouncedPolicy(self.step if by.step is None else by.step, by.paused)

    def over(self, wider: AnnouncedPolicy) -> AnnouncedPolicy:
        """Return this policy, with the step of a wider scope if it has none."""
        return replace(self, step=wider.step) if self.step is None else self


def _violations(update: PolicyUpdate) -> list[Violation]:
    wrong = []
    if len(update.version) > LONGEST_VERSION:
        text = f"has {len(update.version)} characters, at most {LONGEST_VERSION} are allowed"
        wrong.append(Violation("policy.version", text))
    elif not update.version.isprintable():
        wrong.append(Violation("policy.version", "must have only printable characters"))
    if update.step is not None and update.step < 0:
        wrong.append(Violation("policy.step", f"is {update.step}; it must not be negative"))
    return wrong


class SamplingGate:
    """Whether completions of one rollout may be requested now. Lives on one event loop.

    Attributes:
        step: the newest policy step that was announced for the rollout; None: none was. It never decreases.
    """

    __slots__ = ("_closed", "_opened", "_paused", "step")

    def __init__(self) -> None:
        self.step: int | None = None
        self._paused = False
        self._closed = False
        self._opened: asyncio.Event | None = None

    @property
    def is_open(self) -> bool:
        """Whether a completion may be requested now."""
        return not (self._paused or self._closed)

    def announce(self, policy: AnnouncedPolicy) -> None:
        """Take over what was announced. Requests that wait at the gate go on in a later iteration of the event loop."""
        self._paused = policy.paused
        if policy.step is not None:
            self.step = policy.step if self.step is None else max(self.step, policy.step)
        if self.is_open and self._opened is not None:
            self._opened.set()
            self._opened = None

    def close(self) -> None:
        """Let nothing pass any more: the rollout is ending, and whatever waits here is about to be cancelled."""
        self._closed = True

    async def wait(self) -> bool:
        """Wait until the gate is open. Return whether it was closed before."""
        if self.is_open:
            return False
        while not self.is_open:
            if self._opened is None:
                self._opened = asyncio.Event()
            await self._opened.wait()
        return True
