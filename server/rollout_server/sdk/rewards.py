"""Decorators for reward functions. They check the signature at definition and the return value at each call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import Parameter
from types import NoneType, UnionType
from typing import Any, ParamSpec, Union, get_args, get_origin, get_type_hints

__all__ = ["osmosis_reward", "osmosis_rubric"]

P = ParamSpec("P")

_NAMES = ("solution_str", "ground_truth", "extra_info")


def osmosis_reward(function: Callable[P, float]) -> Callable[P, float]:
    """Decorate a reward function: `def f(solution_str: str, ground_truth: str, extra_info: dict = None) -> float`.

    More parameters may follow. A keyword argument `data_source` is dropped. Raises TypeError for another signature, and at a call
    if the function does not return a float.
    """
    parameters, hints = _signature(function)
    for parameter, kind in zip(parameters, (str, str, dict), strict=False):
        if hints.get(parameter.name) is not kind:
            raise TypeError(f"{function.__name__}: {parameter.name} must be annotated as {kind.__name__}")
    if parameters[2].default is Parameter.empty:
        raise TypeError(f"{function.__name__}: extra_info needs a default: extra_info: dict = None")
    return _check_float(function)


def osmosis_rubric(function: Callable[P, float]) -> Callable[P, float]:
    """Decorate a rubric function: `def f(solution_str: str, ground_truth: str | None, extra_info: dict) -> float`.

    `extra_info` is required. A keyword argument `data_source` is dropped. Raises TypeError for another signature, and at a call for
    missing arguments, wrong types or a result that is not a float.
    """
    parameters, hints = _signature(function)
    for parameter in parameters[:2]:
        hint = hints.get(parameter.name)
        kinds = {*get_args(hint)} if get_origin(hint) in (Union, UnionType) else {hint}
        if kinds - ({NoneType} if parameter.name == "ground_truth" else set()) != {str}:
            raise TypeError(f"{function.__name__}: {parameter.name} must be annotated as str")
        if parameter.default is not Parameter.empty:
            raise TypeError(f"{function.__name__}: {parameter.name} must have no default")
    signature, checked = inspect.signature(function), _check_float(function)

    @wraps(function)
    def check_arguments(*args: P.args, **kwargs: P.kwargs) -> float:
        kwargs.pop("data_source", None)
        bound = signature.bind_partial(*args, **kwargs)
        bound.apply_defaults()
        for name, kinds in zip(_NAMES, ((str,), (str, NoneType), (object,)), strict=True):
            if name not in bound.arguments or not isinstance(bound.arguments[name], kinds):
                raise TypeError(f"{function.__name__}: {name} is missing or has a wrong type")
        return checked(*args, **kwargs)

    return check_arguments


def _signature(function: Callable[..., Any]) -> tuple[Sequence[Parameter], dict[str, Any]]:
    """Return the parameters and their type hints. Raises TypeError if the first three parameters have other names."""
    parameters = list(inspect.signature(function).parameters.values())
    if [parameter.name for parameter in parameters[:3]] != list(_NAMES):
        raise TypeError(f"{function.__name__}: the first parameters must be {', '.join(_NAMES)}")
    try:
        return parameters, get_type_hints(function)
    except NameError as error:
        raise TypeError(f"{function.__name__}: an annotation cannot be resolved: {error}") from None


def _check_float(function: Callable[P, float]) -> Callable[P, float]:
    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> float:
        kwargs.pop("data_source", None)
        reward: object = function(*args, **kwargs)
        if not isinstance(reward, float):
            raise TypeError(f"{function.__name__} returned {type(reward).__name__}; it must return a float")
        return reward

    return checked
