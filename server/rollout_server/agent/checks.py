"""The checks that an agent's class and its attributes pass."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import fields
from typing import cast

from rollout_server.agent.rubric import Rubric
from rollout_server.core.limits import Limits
from rollout_server.core.outcome import RewardRule
from rollout_server.core.spec_validation import ID_LENGTH, MAX_SECONDS
from rollout_server.runtime.aio.source_location import written_at
from rollout_server.runtime.ports import Tool
from rollout_server.runtime.tools.toolset import McpServer
from rollout_server.tool import FunctionTool, tool


def check_method(cls: type, name: str, arguments: Sequence[str]) -> None:
    """Raise TypeError if the attribute cannot be called as a method with these arguments besides `self`."""
    owner, method = f"agent class {cls.__name__}: {name}", getattr(cls, name)
    if not callable(method):
        raise TypeError(f"{owner} must be a method, it is {method!r}")
    where = written_at(method)
    if name != "dataset" and (inspect.isasyncgenfunction(method) or inspect.isgeneratorfunction(method)):
        raise TypeError(f"{owner} must not be a generator: it contains `yield`; return the result{where}")
    if name == "choose_tools" and inspect.iscoroutinefunction(method):
        raise TypeError(f"{owner} must be a plain `def`: the server calls it while it accepts the request{where}")
    if not inspect.isroutine(method):  # a callable object, whose signature says nothing about `self`
        return
    bound = isinstance(inspect.getattr_static(cls, name), staticmethod | classmethod)
    wanted = arguments if bound else ("self", *arguments)
    try:
        # The outermost wrapper is what the runtime calls; a decorator may supply further arguments to the function inside.
        inspect.signature(method, follow_wrapped=False).bind(*wanted)
    except TypeError as error:
        raise TypeError(f"{owner} is called with ({', '.join(wanted)}): {error}{where}") from None


def checked_attribute(owner: str, attribute: str, value: object) -> object:
    """Return the checked value of an attribute; tools become a tuple of tools. Raises TypeError or ValueError."""
    if attribute == "tools":
        return checked_tools(value, owner)
    if attribute in ("cleanup_seconds", "reward_group_seconds"):
        if value is None or not _is_bound("seconds", value):
            raise ValueError(f"{owner}: {attribute} is {value!r}; it must be a number above 0, at most {MAX_SECONDS:,}")
        return value
    if attribute == "reward_rule":
        return _checked_rule(owner, value)
    if attribute == "rubric":
        return _checked_rubric(owner, value)
    wanted = {"limits": Limits, "replayable": bool}.get(attribute, str)
    if not isinstance(value, wanted):
        state = "is missing" if value is None else f"is {value!r}"
        raise TypeError(f"{owner}: {attribute} {state}; it must be a {wanted.__name__}")
    if isinstance(value, Limits):
        wrong = [f"{f.name}={bound!r}" for f in fields(value) if not _is_bound(f.name, bound := getattr(value, f.name))]
        if wrong:
            kinds = f"seconds may be any number up to {MAX_SECONDS:,}, the others are integers below 2**32"
            raise ValueError(f"{owner}: limits must be positive or None, not {', '.join(wrong)}; {kinds}")
    if isinstance(value, str):
        _check_text(value, f"{owner}: {attribute}")
    if attribute in ("name", "version") and isinstance(value, str):
        if not value.strip():
            raise ValueError(f"{owner}: {attribute} must not be blank")
        if len(value) > ID_LENGTH:
            raise ValueError(f"{owner}: {attribute} has {len(value)} characters; at most {ID_LENGTH} are allowed")
    return value


def _checked_rubric(owner: str, value: object) -> Rubric | None:
    if value is None:
        return None
    if not isinstance(value, Rubric):
        raise TypeError(f"{owner}: rubric is {value!r:.100}; it must be a Rubric")
    value.belong_to(owner)
    return value


def _checked_rule(owner: str, value: object) -> object:
    rules = [rule.value for rule in RewardRule]
    if value not in rules:
        raise ValueError(f"{owner}: reward_rule is {value!r:.100}; it must be one of {', '.join(rules)}")
    return value


def _check_text(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} contains a lone surrogate, which UTF-8 cannot encode; remove it") from None


def _is_bound(name: str, bound: object) -> bool:
    if bound is None:
        return True
    if name == "seconds":
        return isinstance(bound, int | float) and not isinstance(bound, bool) and 0 < bound <= MAX_SECONDS
    return isinstance(bound, int) and not isinstance(bound, bool) and 0 < bound < 2**32


def checked_tools(candidates: object, owner: str) -> Sequence[Tool | McpServer]:
    """Return tools and toolsets as they are, functions as tools. Raises TypeError or ValueError."""
    if not isinstance(candidates, Sequence) or isinstance(candidates, str):
        raise TypeError(f"{owner}: tools must be a list or tuple of tools, not {candidates!r}")
    tools = tuple(_as_tool(candidate, owner) for candidate in candidates)
    named = [each for each in tools if not isinstance(each, McpServer)]
    names = [each.name for each in named]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        locations = [_location_of(each) for each in named if each.name in doubled]
        raise ValueError(
            f"{owner}: more than one tool has the name {', '.join(map(repr, doubled))}: {'; '.join(locations)}"
        )
    # Unchanged if nothing was converted: the agent keeps its own list or tuple.
    return candidates if candidates == tools else tools


def _location_of(candidate: Tool) -> str:
    if isinstance(candidate, FunctionTool):
        return str(candidate.definition)
    return f"{candidate!r}{written_at(candidate.run)}"


def _as_tool(candidate: object, owner: str) -> Tool | McpServer:
    if isinstance(candidate, FunctionTool | McpServer):
        return candidate
    if inspect.isfunction(candidate) or inspect.ismethod(candidate):
        try:
            return tool(candidate)
        except TypeError as error:
            raise TypeError(f"{owner}: {error}") from error
    texts = [getattr(candidate, name, None) for name in ("name", "description", "parameters_json_schema")]
    if isinstance(candidate, type) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{owner}: {candidate!r} is neither a tool nor a function")
    _check_text("".join(map(str, texts)), f"{owner}: tool {texts[0]!r}")
    if not inspect.iscoroutinefunction(getattr(candidate, "run", None)):
        raise TypeError(f"{owner}: tool {texts[0]!r} has no `async def run`")
    return cast("Tool", candidate)
