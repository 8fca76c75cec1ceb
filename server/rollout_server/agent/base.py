"""The `Agent` base class, and the checks that its subclasses pass."""

from __future__ import annotations

import inspect
from abc import ABCMeta
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rollout_server.agent.rubric import Rubric
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

_METHODS = {
    "setup": ("run",),
    "play": ("run",),
    "reward": ("run",),
    "cleanup": ("run",),
    "start": (),
    "stop": (),
    "choose_tools": ("request",),
}
"""The arguments, besides `self`, that each method is called with."""
_CHECKED = ("name", "version", "description", "tools", "limits", "rubric", "replayable", "cleanup_seconds")


class _AgentClass(ABCMeta):
    """Metaclass that checks an agent once its construction is complete.

    It checks after the outermost `__init__` returned. So a subclass may set attributes in `__init__` and need not call
    `super().__init__()`.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        agent = super().__call__(*args, **kwargs)
        owner = f"agent class {cls.__name__}"
        for attribute in _CHECKED:
            value = getattr(agent, attribute, None)
            checked = _checked_attribute(owner, attribute, value)
            if checked is not value:
                object.__setattr__(agent, attribute, checked)  # an agent may be a frozen dataclass
        return agent


class Agent(metaclass=_AgentClass):
    """Base class of agents: a subclass sets a name and tools, and may override the loop (`play`) and the `reward`.

    One object runs many rollouts concurrently. Keep the state of one rollout in local variables of `play` or in `run.state`, never
    in `self`.

    A class is checked when it is defined, and an object when it is constructed. What is wrong raises TypeError or ValueError with
    the name of the attribute or method; for methods and tools also with file and line.

    Each rollout calls `setup`, `play`, `reward` and `cleanup`, in this order. They, `start` and `stop` may be `async def`, which
    runs on the event loop, or plain `def`, which runs in a thread. A thread cannot be cancelled, so the server abandons it once its
    rollout has ended. Long-running code in a thread should check `run.cancelled` regularly.

    Attributes:
        name: requests choose the agent by it; unique within a server, at most 256 characters. Required.
        version: change it whenever the agent's behaviour changes; at most 256 characters.
        description: for people; by default the docstring of the class.
        tools: the tools that the model may call, in the order in which the chat template lists them. Plain functions are converted
            with `tool`.
        limits: the agent's own limits. For each limit the lower of this one and the request's applies.
        rubric: weighted reward functions, which the default `reward` calls; None for no reward.
        replayable: whether `play` repeats the same steps when it runs again over the recorded results. True for the default loop.
            A class that overrides `setup` or `play` is not replayable unless it sets this to True.
        cleanup_seconds: time limit of `cleanup`, in seconds. The outcome of a rollout and the shutdown of the server wait for it.
    """

    name: str
    version: str = "1"
    description: str = ""
    tools: Sequence[Tool] = ()
    limits: Limits = Limits()
    rubric: Rubric | None = None
    replayable: bool = True
    cleanup_seconds: float = 10.0

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
        # Return types that let a subclass write a plain `def`, and that accept `await super().play(run)`.

        def setup(self, run: Run) -> Any: ...
        def play(self, run: Run) -> Any: ...
        def reward(self, run: Run) -> RewardValue | Awaitable[RewardValue]: ...
        def cleanup(self, run: Run) -> Any: ...
        def start(self) -> Any: ...
        def stop(self) -> Any: ...

    else:

        async def setup(self, run: Run) -> None:
            """Prepare one rollout, for example open its sandbox and store it in `run.state`. Called before the first turn.

            The time limit of the rollout applies. An exception ends the rollout as a failure, without `play` and `reward`.
            """

        async def play(self, run: Run) -> None:
            """Run one rollout. The default loop samples and runs tool calls until a completion has none.

            An override as a plain `def` waits with `run.wait(run.sample())`. An exception ends the rollout as a failure. When a
            limit is met or the trainer fails, the methods of `run` raise `RolloutEnded`. It derives from BaseException, so `except
            Exception` does not catch it; do not catch it elsewhere either.

            Args:
                run: the conversation, and the methods that sample, call tools and append messages.
            """
            while calls := (await run.sample()).tool_calls:
                await run.call(calls)

        async def reward(self, run: Run) -> RewardValue:
            """Compute the reward of a rollout that completed; not called after a failure or a cancellation.

            A rollout completes when `play` returns, calls `run.finish()`, or meets a limit other than `seconds`.

            The default computes it from `rubric`.

            Returns:
                A finite number, a `RewardResult` (a reward with named scores), or None for no reward.
            """
            return None if self.rubric is None else await self.rubric.score(run)

        async def cleanup(self, run: Run) -> None:
            """Release what `setup` and `play` acquired. Called once for each rollout whose `setup` was called.

            It runs after all other methods: after success, failure, cancellation, timeout and shutdown, and also if `setup`
            failed halfway. It has `cleanup_seconds`. An exception, or exceeding the limit, is logged and is the warning
            `cleanup_failed` of the outcome; end and reward stay the same. The properties of `run` can be read, such as `state` and
            `metadata`; `run.cancelled` is true. Methods that sample, call tools or record something raise `RolloutEnded`.
            """

        async def start(self) -> None:
            """Prepare the agent. Called once, before the server accepts requests. An exception keeps the server from starting."""

        async def stop(self) -> None:
            """Release what `start` acquired. Called once, after all rollouts have ended, and only if `start` succeeded.

            It has 10 seconds. An exception is logged and does not stop the shutdown.
            """

    def choose_tools(self, request: Request) -> Sequence[Tool]:
        """Return the tools of one rollout; by default all of `tools`. Only these are in the chat template and can be called.

        Called before the rollout is accepted, so it must be a quick plain `def`. Trainers of `POST /rollout` learn the tools from
        `GET /tools`, which lists `tools`. There, a request for which this method returns other tools is refused.

        Args:
            request: the start request, with its messages, metadata and labels.
        """
        return self.tools

    def overrides(self, method: str) -> bool:
        """Return whether the agent has a `setup` or `cleanup` of its own; the runtime does not call the default ones."""
        return getattr(getattr(self, method), "__func__", None) is not getattr(Agent, method)

    async def run_setup(self, run: object) -> None:
        """Call `setup`; the runtime's entry point."""
        await _call(self.setup, cast("Run", run), f"setup() of agent {self.name}")

    async def run_cleanup(self, run: object) -> None:
        """Call `cleanup`; the runtime's entry point."""
        await _call(self.cleanup, cast("Run", run), f"cleanup() of agent {self.name}")

    async def perform(self, run: object) -> None:
        """Call `play`; the runtime's entry point."""
        own_run = cast("Run", run)
        await _call(self.play, own_run, f"play() of agent {self.name}")

    async def judge(self, run: object) -> RewardResult:
        """Call `reward` and return its checked result; the runtime's entry point.

        Raises TypeError or ValueError if the result is not a reward.
        """
        own_run = cast("Run", run)
        value = await _call(self.reward, own_run, f"reward() of agent {self.name}")
        with _with_location(self.reward):
            return checked_reward(value, f"agent {self.name!r}: reward")

    def tools_for(self, request: Request) -> Sequence[Tool]:
        """Call `choose_tools` and return its checked result; the runtime's entry point.

        Raises TypeError or ValueError if the result is not a list or tuple of tools.
        """
        chosen = self.choose_tools(request)
        with _with_location(self.choose_tools):
            return _as_tools(chosen, f"agent {self.name!r}: choose_tools")


@contextmanager
def _with_location(function: Callable[..., object]) -> Iterator[None]:
    """Append the source location of `function` to a TypeError or ValueError that its result causes."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"{error}{written_at(function)}") from None


async def _call(function: Callable[[Run], _T | Awaitable[_T]], run: Run, name: str) -> _T:
    """Call an author's function, on the event loop if it is a coroutine function, else in a thread. Return its result."""
    if inspect.iscoroutinefunction(function):
        return cast("_T", await function(run))
    result = await run.run_in_thread(f"{name}{written_at(function)}", lambda: function(run))
    # A plain function may return an awaitable, for example a lambda or a wrapper around a coroutine function.
    return await cast("Awaitable[_T]", result) if inspect.isawaitable(result) else result


def _check_method(cls: type[Agent], name: str) -> None:
    """Raise TypeError if the attribute cannot be called as the method of that name is called."""
    owner, method = f"agent class {cls.__name__}: {name}", getattr(cls, name)
    if not callable(method):
        raise TypeError(f"{owner} must be a method, it is {method!r}")
    where = written_at(method)
    if inspect.isasyncgenfunction(method) or inspect.isgeneratorfunction(method):
        raise TypeError(f"{owner} must not be a generator: it contains `yield`; return the result{where}")
    if name == "choose_tools" and inspect.iscoroutinefunction(method):
        raise TypeError(f"{owner} must be a plain `def`: the server calls it while it accepts the request{where}")
    if not inspect.isroutine(method):  # a callable object, whose signature says nothing about `self`
        return
    bound = isinstance(inspect.getattr_static(cls, name), staticmethod | classmethod)
    wanted = _METHODS[name] if bound else ("self", *_METHODS[name])
    try:
        # The outermost wrapper is what the runtime calls; a decorator may supply further arguments to the function inside.
        inspect.signature(method, follow_wrapped=False).bind(*wanted)
    except TypeError as error:
        raise TypeError(f"{owner} is called with ({', '.join(wanted)}): {error}{where}") from None


def _is_replayable(cls: type[Agent]) -> bool:
    """Return whether the agent's `play` is replayable.

    The nearest class in the MRO that sets `replayable` decides. A class that overrides `setup` or `play` without setting it is
    not replayable.
    """
    for base in cls.__mro__:
        if "replayable" in vars(base):
            return bool(vars(base)["replayable"])
        if not vars(base).keys().isdisjoint(("setup", "play")):
            return False
    return False


def _checked_attribute(owner: str, attribute: str, value: object) -> object:
    """Return the checked value of an attribute; tools become a tuple of tools. Raises TypeError or ValueError."""
    if attribute == "tools":
        return _as_tools(value, owner)
    if attribute == "cleanup_seconds":
        if value is None or not _is_bound("seconds", value):
            raise ValueError(
                f"{owner}: cleanup_seconds is {value!r}; it must be a number above 0, at most {MAX_SECONDS:,}"
            )
        return value
    if attribute == "rubric" and value is None:
        return None
    wanted = {"limits": Limits, "rubric": Rubric, "replayable": bool}.get(attribute, str)
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
    # Unchanged if nothing was converted: the agent keeps its own list or tuple.
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
