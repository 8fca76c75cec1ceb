"""Validation of the value that an agent's `reward` returns. The outcome and the trainer receive it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import SupportsFloat, TypeAlias

from rollout_server.core.message import MalformedMessage, parse_object
from rollout_server.core.outcome import RewardResult
from rollout_server.core.spec_validation import ID_LENGTH

RewardValue: TypeAlias = float | RewardResult | None
"""A reward: a finite number or a bool, a number with named scores, or None."""

GroupRewards: TypeAlias = Sequence[RewardValue]
"""Rewards of the runs of a group, in their order; None leaves the run's own reward as it is."""

_MOST_SCORES = 1000
_LONGEST_EXTRA = 1024 * 1024
"""In characters."""


def checked_reward(reward: object, where: str) -> RewardResult:
    """Return the reward as a `RewardResult`. Raise TypeError or ValueError, whose text begins with `where`."""
    if reward is None:
        return RewardResult()
    if not isinstance(reward, RewardResult):
        return RewardResult(_number(reward, where))
    scores, extra = reward.scores, reward.extra_json
    if scores is not None and not (isinstance(scores, Mapping) and len(scores) <= _MOST_SCORES):
        raise TypeError(
            f"{where} in a RewardResult: scores are a dictionary of at most {_MOST_SCORES} numbers, not {scores!r:.100}"
        )
    odd = [key for key in scores or () if not isinstance(key, str) or len(key) > ID_LENGTH]
    if odd:
        raise TypeError(
            f"{where} in a RewardResult: a score's name is a text of at most {ID_LENGTH} characters, not {odd[0]!r:.100}"
        )
    try:
        if not isinstance(extra, str):
            raise MalformedMessage(f"it is not a string, but {extra!r:.100}")
        if len(extra) > _LONGEST_EXTRA:
            raise MalformedMessage(f"it has {len(extra):,} characters, at most {_LONGEST_EXTRA:,} are allowed")
        if extra:
            parse_object(extra)
    except MalformedMessage as error:
        raise ValueError(f"{where} in a RewardResult: extra_json must be one JSON object: {error}") from None
    return replace(
        reward,
        roles=None if reward.roles is None else _checked_roles(reward.roles, where),
        reward=None if reward.reward is None else _number(reward.reward, f"{where} in a RewardResult"),
        scores=scores and {key: _number(value, f"{where}, score {key!r},") for key, value in scores.items()},
    )


def _checked_roles(roles: object, where: str) -> Mapping[str, float]:
    if not (isinstance(roles, Mapping) and len(roles) <= _MOST_SCORES):
        raise TypeError(
            f"{where} in a RewardResult: roles are a dictionary of at most {_MOST_SCORES} numbers, not {roles!r:.100}"
        )
    for name in roles:
        if not isinstance(name, str) or not 0 < len(name) <= ID_LENGTH:
            text = f"a role's name is a text of 1 to {ID_LENGTH} characters, not {name!r:.100}"
            raise TypeError(f"{where} in a RewardResult: {text}")
    return {name: _number(value, f"{where}, role {name!r},") for name, value in roles.items()}


def _number(value: object, where: str) -> float:
    if inspect.iscoroutine(value):
        value.close()
        raise TypeError(f"{where} returned a coroutine: an `await` is missing before the call")
    try:
        number = score_number(value)
    except TypeError:
        text = f"{where} returned {value!r:.1000}; it must return a finite number, a RewardResult or None"
        raise TypeError(text) from None
    if not math.isfinite(number):
        raise ValueError(f"{where} returned {value!r}, which is not a finite number")
    return number


def score_number(value: object) -> float:
    """Return a reward or a score as a float, as `real_number` does; True is 1.0, for functions that return a comparison."""
    return float(value) if isinstance(value, bool) else real_number(value)


def real_number(value: object) -> float:
    """Return a number as a float: any that `float` converts, such as one of NumPy, a Decimal or a tensor of one element.

    A number that is too large is infinite. Raise TypeError for everything else, also for a text and a bool.
    """
    if isinstance(value, bool) or not isinstance(value, SupportsFloat):
        raise TypeError
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError, RuntimeError):  # an array or a tensor of several elements
        raise TypeError from None


def as_list(values: object) -> object:
    """Return an array of NumPy, torch and others as a list. Any other value stays as it is."""
    convert = getattr(values, "tolist", None)
    return convert() if callable(convert) else values
