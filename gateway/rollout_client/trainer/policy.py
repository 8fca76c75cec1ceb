"""The policy that a trainer announces: which weights generate now, and whether sampling is paused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from osmosis.rollout.v1.spec_pb2 import PolicyUpdate

from rollout_client.trainer.generation import Generated, Turn, check_step

PAUSE_SECONDS: Final = 0.1
"""Delay until the server requests a turn again that came during a pause. It then waits until sampling goes on."""
_LONGEST_VERSION: Final = 256


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy as it was announced.

    Args:
        version: its version; empty: none was announced.
        step: its step; None: none was announced.
    """

    version: str = ""
    step: int | None = None

    def stamp(self, value: Any) -> Any:
        """Return a turn, or a list of turns, with the announced step if it is newer than theirs. Other values are not changed."""
        if isinstance(value, Turn):
            newer = self.step is not None and self.step > (-1 if value.policy_step is None else value.policy_step)
            return replace(value, policy_step=self.step) if newer else value
        batch = isinstance(value, list) and value and isinstance(value[0], Turn)
        return [self.stamp(each) for each in value] if batch else value

    def label(self, result: Any) -> Any:
        """Return a `Generated`, or a list with some, with version and step of this policy where it has none.

        One that names another version, or another step, is not completed: nobody knows the rest. Other values are not changed.
        """
        if isinstance(result, Sequence) and not isinstance(result, str | bytes):
            return [self.label(each) for each in result]
        if not isinstance(result, Generated):
            return result
        named = result.policy_version != "", result.policy_step is not None
        same = result.policy_version in ("", self.version) and result.policy_step in (None, self.step)
        return result if all(named) or not same else replace(result, policy_version=self.version, policy_step=self.step)


class AnnouncedPolicy:
    """The newest policy that the trainer announced, and whether sampling is paused, so that no completion may be started."""

    def __init__(self) -> None:
        self.policy = Policy()
        self.paused = False

    @property
    def is_initial(self) -> bool:
        """Whether there is nothing to announce."""
        return self.policy == Policy() and not self.paused

    def change(self, version: str, step: int | None, *, paused: bool) -> None:
        """Change what is announced.

        Args:
            version: its version; empty: not changed.
            step: its step; None: not changed.
            paused: whether sampling is paused.

        Raises TypeError and ValueError without any change.
        """
        _check_version(version)
        check_step(step, "step")
        known = self.policy
        if step is not None and known.step is not None and step < known.step:
            raise ValueError(f"step must not decrease: {step} is below {known.step}, which was announced before")
        self.policy = Policy(version or known.version, known.step if step is None else step)
        self.paused = paused

    def to_proto(self) -> PolicyUpdate:
        """Return the update that announces everything anew."""
        return PolicyUpdate(version=self.policy.version, step=self.policy.step, paused=self.paused)


def _check_version(version: str) -> None:
    if not isinstance(version, str):
        raise TypeError(f"version must be a str, not {type(version).__name__}")
    if len(version) > _LONGEST_VERSION or not version.isprintable():
        raise ValueError(f"version must have at most {_LONGEST_VERSION} characters, all of them printable")
