"""Agents: what their authors write."""

from __future__ import annotations

import inspect
from abc import ABCMeta
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rollout_server.core.limits import Limits
from rollout_server.core.outcome import RewardResult
from rollout_server.core.spec_validation import ID_LENGTH, MAX_SECONDS
from rollout_server.runtime.agent_protocol import Request
from rollout_server.runtime.aio.source_location import written_at
from rollout_server.runtime.ports import Tool
from rollout_server.runtime.run.reward import RewardValue, checked_reward
from rollout_server.runtime.run.run import Run
from rollout_server.tool import FunctionTool, tool

_T = TypeVar("_T")

_METHODS = {"play": ("run",), "reward": ("run",), "start": (), "stop": (), "choose_tools": ("request",)}
"""What each is called with, beside the agent."""
_CHECKED = ("name", "version", "description", "tools", "limits", "replayable")


class _AgentClass(ABCMeta):
    """Checks an agent once it is built: then nothing depends on what its own `__init__` sets, or whether it calls ours."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        agent = super().__call__(*args, **kwargs)
        owner = f"agent class {cls.__name__}"
        for attribute in _CHECKED:
            value = getattr(agent, attribute, None)
            checked = _checked_attribute(owner, attribute, value)
            if checked is not value:
                object.__setattr__(agent, attribute, checked)  # a frozen dataclass may be an agent, too
        return agent


class Agent(metaclass=_AgentClass):
    """An agent: subclass it, give it a name and tools, and where the default loop is not enough, a `play` of its own.

    One object plays many rollouts at the same time: what belongs to one of them lives in `play` or in `run.state`, not in `self`.
    A class is checked where it is defined, an object when it is made; what is wrong is a TypeError or ValueError.

    `play`, `reward`, `start` and `stop` may be `async def`, on the event loop, or plain functions, each call in a thread. A
    thread cannot be cancelled: it is left alone once its rollout has ended, and should look at `run.cancelled` now and then.

    Attributes:
        name: unique within a server, at most 256 characters.
        version: changes whenever the agent plays differently.
        description: for people; the class's docstring unless it is given.
        tools: what the model may call, in the order in which it is told; functions become tools.
        limits: the agent's own; of these and a request's the lower holds.
        replayable: `play` does the same over again when it is fed with the same answers. True for the default loop; an
            own `play` has to say so.
    """

    name: str
    version: str = "1"
    description: str = ""
    tools: Sequence[Tool] = ()
    limits: Limits = Limits()
    replayable: bool = True

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        for attribute in _CHECKED:
            if attribute in vars(cls):
                setattr(
                    cls, attribute, _checked_attribute(f"agent class {cls.__name__}", attribute, vars(cls)[attribute])
                )
        if "description" not in vars(cls) and cls.__doc__:
            cls.description = inspect.cleandoc(cls.__doc__)
        cls.replayable = _is_replayable(cls)
        for method in _METHODS:
            _check_method(cls, method)

    if TYPE_CHECKING:
        # Typed so that one's own may be plain, and that `await super().play(run)` is right.

        def play(self, run: Run) -> Any: ...
        def reward(self, run: Run) -> RewardValue | Awaitable[RewardValue]: ...
        def start(self) -> Any: ...
        def stop(self) -> Any: ...

    else:

        async def play(self, run: Run) -> None:
            """Plays one rollout: samples and calls tools until the model calls none.

            A plain function waits with `run.wait(run.sample())`.
            """
            while calls := (await run.sample()).tool_calls:
                await run.call(calls)

        async def reward(self, run: Run) -> RewardValue:
            """Judges a rollout that came to its end: a finite number, a `RewardResult`, or None for no reward."""
            return None

        async def start(self) -> None:
            """Called once, before the server takes requests. A server whose agent cannot start does not."""

        async def stop(self) -> None:
            """Called once, after the server's rollouts have ended, if `start` came to its end. What it raises is logged."""

    def choose_tools(self, request: Request) -> Sequence[Tool]:
        """The tools of one rollout: its model is told these only. Called before the rollout is accepted, so it must be quick.

        Trainers of `POST /rollout` know the agent's `tools` and no others; there, a choice of others refuses the request.
        """
        return self.tools

    async def perform(self, run: object) -> None:
        """How the runtime calls `play`."""
        own_run = cast("Run", run)
        await _call(self.play, own_run, f"the play of agent {self.name}")

    async def judge(self, run: object) -> RewardResult:
        """How the runtime calls `reward`. Raises TypeError or ValueError for what is no reward."""
        own_run = cast("Run", run)
        value = await _call(self.reward, own_run, f"the reward of agent {self.name}")
        with _with_location(self.reward):
            return checked_reward(value, f"agent {self.name!r}: reward")

    def tools_for(self, request: Request) -> Sequence[Tool]:
        """How the runtime calls `choose_tools`. Raises TypeError or ValueError for what are no tools."""
        chosen = self.choose_tools(request)
        with _with_location(self.choose_tools):
            return _as_tools(chosen, f"agent {self.name!r}: choose_tools")


@contextmanager
def _with_location(function: Callable[..., object]) -> Iterator[None]:
    """Says of what is wrong with a result where the function is that returned it."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"{error}{written_at(function)}") from None


async def _call(function: Callable[[Run], _T | Awaitable[_T]], run: Run, name: str) -> _T:
    """The result of an author's function, wherever it runs."""
    if inspect.iscoroutinefunction(function):
        return cast("_T", await function(run))
    result = await run.run_in_thread(f"{name}{written_at(function)}", lambda: function(run))
    return await cast("Awaitable[_T]", result) if inspect.isawaitable(result) else result


def _check_method(cls: type[Agent], name: str) -> None:
    """Raises TypeError for what cannot be called as the method of that name is."""
    owner, method = f"agent class {cls.__name__}: {name}", getattr(cls, name)
    if not callable(method):
        raise TypeError(f"{owner} must be a method, it is {method!r}")
    where = written_at(method)
    if inspect.isasyncgenfunction(method) or inspect.isgeneratorfunction(method):
        raise TypeError(f"{owner} must return, it has a `yield`{where}")
    if name == "choose_tools" and inspect.iscoroutinefunction(method):
        raise TypeError(f"{owner} must be a plain `def`: a request is answered without waiting{where}")
    if not inspect.isroutine(method):  # an object that is called, by what it takes itself
        return
    bound = isinstance(inspect.getattr_static(cls, name), staticmethod | classmethod)
    wanted = _METHODS[name] if bound else ("self", *_METHODS[name])
    try:
        inspect.signature(method, follow_wrapped=False).bind(*wanted)  # decorators may add what it takes
    except TypeError as error:
        raise TypeError(f"{owner} is called with ({', '.join(wanted)}): {error}{where}") from None


def _is_replayable(cls: type[Agent]) -> bool:
    """What the nearest class says that has a word on it; a `play` without one counts as no."""
    for base in cls.__mro__:
        if "replayable" in vars(base):
            return bool(vars(base)["replayable"])
        if "play" in vars(base):
            return False
    return False


def _checked_attribute(owner: str, attribute: str, value: object) -> object:
    """The checked value of an attribute; tools become a tuple of tools."""
    if attribute == "tools":
        return _as_tools(value, owner)
    wanted = {"limits": Limits, "replayable": bool}.get(attribute, str)
    if not isinstance(value, wanted):
        state = "is missing" if value is None else f"is {value!r}"
        raise TypeError(f"{owner}: {attribute} {state}, a {wanted.__name__} is needed")
    if isinstance(value, Limits):
        wrong = [f"{f.name}={bound!r}" for f in fields(value) if not _is_bound(f.name, bound := getattr(value, f.name))]
        if wrong:
            kinds = f"all are whole numbers below 2**32, but seconds any number up to {MAX_SECONDS:,}"
            raise ValueError(f"{owner}: limits must be positive or None, not {', '.join(wrong)}; {kinds}")
    if isinstance(value, str):
        _check_text(value, f"{owner}: {attribute}")
    if attribute in ("name", "version") and isinstance(value, str):
        if not value.strip():
            raise ValueError(f"{owner}: {attribute} must not be blank")
        if len(value) > ID_LENGTH:
            raise ValueError(f"{owner}: {attribute} has {len(value)} characters, at most {ID_LENGTH} are allowed")
    return value


def _check_text(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} holds half of a surrogate pair, which UTF-8 cannot carry") from None


def _is_bound(name: str, bound: object) -> bool:
    if bound is None:
        return True
    if name == "seconds":
        return isinstance(bound, int | float) and not isinstance(bound, bool) and 0 < bound <= MAX_SECONDS
    return isinstance(bound, int) and not isinstance(bound, bool) and 0 < bound < 2**32


def _as_tools(candidates: object, owner: str) -> Sequence[Tool]:
    if not isinstance(candidates, Sequence) or isinstance(candidates, str):
        raise TypeError(f"{owner}: tools must be a list or tuple of tools, not {candidates!r}")
    tools = tuple(_as_tool(candidate, owner) for candidate in candidates)
    names = [each.name for each in tools]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        locations = [_location_of(each) for each in tools if each.name in doubled]
        raise ValueError(
            f"{owner}: more than one tool has the name {', '.join(map(repr, doubled))}: {'; '.join(locations)}"
        )
    return candidates if candidates == tools else tools


def _location_of(candidate: Tool) -> str:
    if isinstance(candidate, FunctionTool):
        return str(candidate.definition)
    return f"{candidate!r}{written_at(candidate.run)}"


def _as_tool(candidate: object, owner: str) -> Tool:
    if isinstance(candidate, FunctionTool):
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
