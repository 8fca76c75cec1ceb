"""The `Agent` base class."""

from __future__ import annotations

import inspect
import os
from abc import ABCMeta
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, TypeVar, cast

from rollout_server.agent.checks import check_method, checked_attribute, checked_tools
from rollout_server.agent.rubric import Rubric
from rollout_server.core.limits import Limits
from rollout_server.core.outcome import RewardResult, RewardRule
from rollout_server.runtime.agent_protocol import END, Request
from rollout_server.runtime.aio.source_location import written_at
from rollout_server.runtime.errors import AgentMistake
from rollout_server.runtime.ports import Tool
from rollout_server.runtime.run.reward import GroupRewards, RewardValue, as_list, checked_reward
from rollout_server.runtime.run.run import Run
from rollout_server.runtime.tools.listing import check_names
from rollout_server.runtime.tools.toolset import McpServer

_T = TypeVar("_T")
Rows: TypeAlias = "Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]] | str | os.PathLike[str]"
"""What `Agent.dataset` returns: rows, or the path of a dataset."""

_METHODS = {
    "setup": ("run",),
    "play": ("run",),
    "reward": ("run",),
    "cleanup": ("run",),
    "reward_group": ("runs",),
    "start": (),
    "stop": (),
    "choose_tools": ("request",),
    "dataset": ("split",),
}
"""The arguments, besides `self`, that each method is called with."""
_CHECKED = (
    "name",
    "version",
    "description",
    "tools",
    "limits",
    "rubric",
    "replayable",
    "cleanup_seconds",
    "reward_group_seconds",
    "reward_rule",
)


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
            checked = checked_attribute(owner, attribute, value)
            if checked is not value:
                object.__setattr__(agent, attribute, checked)  # an agent may be a frozen dataclass
        agent.check_attributes()
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
            with `tool`; `mcp(...)` stands for the tools of an MCP server.
        limits: the agent's own limits. For each limit the lower of this one and the request's applies.
        rubric: weighted reward functions, which the default `reward` calls; None for no reward.
        replayable: whether `play` repeats the same steps when it runs again over the recorded results. True for the default loop.
            A class that overrides `setup` or `play` is not replayable unless it sets this to True.
        on_restart: what becomes of an unfinished rollout after a restart of the server, for agents that own their loop; see
            `OwnLoopAgent`. All others have "end".
        external: whether the agent runs elsewhere. The start of a rollout then returns the access to its model endpoint.
        cleanup_seconds: time limit of `cleanup`, in seconds. The outcome of a rollout and the shutdown of the server wait for it.
        reward_group_seconds: time limit of `reward_group`, in seconds. The outcomes of the group's rollouts wait for it.
        reward_rule: how the rewards of a rollout reach its samples. "copy": each trainable sample has the rollout's reward.
            "split": the reward is divided equally among them. "own": each has the sum of what `run.give_reward` gave to its turns
            and `RewardResult.roles` gave to its role.
    """

    name: str
    version: str = "1"
    description: str = ""
    tools: Sequence[Tool | McpServer] = ()
    limits: Limits = Limits()
    rubric: Rubric | None = None
    replayable: bool = True
    on_restart: Literal["end", "again", "continue"] = "end"
    external: bool = False
    cleanup_seconds: float = 10.0
    reward_group_seconds: float = 600.0
    reward_rule: Literal["copy", "split", "own"] = "copy"
    _restarts: ClassVar[tuple[str, ...]] = (END,)
    _listed: Mapping[McpServer, Sequence[Tool]] = MappingProxyType({})

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        for attribute in _CHECKED:
            if attribute in vars(cls):
                setattr(
                    cls, attribute, checked_attribute(f"agent class {cls.__name__}", attribute, vars(cls)[attribute])
                )
        if "description" not in vars(cls) and cls.__doc__:
            cls.description = inspect.cleandoc(cls.__doc__)
        cls.replayable = _is_replayable(cls)
        for method, arguments in _METHODS.items():
            check_method(cls, method, arguments)

    if TYPE_CHECKING:
        # Return types that let a subclass write a plain `def`, and that accept `await super().play(run)`.

        def setup(self, run: Run) -> Any: ...
        def play(self, run: Run) -> Any: ...
        def reward(self, run: Run) -> RewardValue | Awaitable[RewardValue]: ...
        def reward_group(self, runs: Sequence[Run]) -> GroupRewards | Awaitable[GroupRewards]: ...
        def cleanup(self, run: Run) -> Any: ...
        def start(self) -> Any: ...
        def stop(self) -> Any: ...
        def dataset(self, split: str) -> Rows | Awaitable[Rows]: ...

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

        async def reward_group(self, runs: Sequence[Run]) -> GroupRewards:
            """Compute the rewards of a group that was started as one (`StartGroup`), for example by ranking its rollouts.

            Called once per group, after `play`, `reward` and `cleanup` of all its rollouts have ended, if at least one completed.
            While rollouts wait for this call they hold no slot, and their time limits do not run. It has `reward_group_seconds`. An
            exception, a result that is not one, or exceeding the limit makes all these rollouts fail. Without an override, rollouts
            do not wait.

            Args:
                runs: the rollouts that completed, in order of `run.request.group_index`. `run.reward` is what `reward` returned.
                    They can be read, and `run.model()` works; methods that sample, call tools or record something else raise
                    `RolloutEnded`.

            Returns:
                One value per run: a number or a `RewardResult` replaces the run's reward, and its scores are added to the run's;
                None leaves the run's reward as it is. The default computes them from the group functions of `rubric`.
            """
            if self.rubric is None:
                return [None for _ in runs]
            return await self.rubric.score_group(runs, [run.reward for run in runs])

        async def cleanup(self, run: Run) -> None:
            """Release what `setup` and `play` acquired. Called once for each rollout whose `setup` was called.

            A server that stops calls it also for rollouts that its next process continues, except for those of an `ExternalAgent`.
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

        def dataset(self, split: str) -> Rows:
            """Return the rows for `rollout eval` without DATASET, or the path of a dataset. By default an agent has none.

            Called once, before the server starts and before `start`. It may be a plain `def` or `async def`, and may `yield`
            rows, which are then read as they are needed.

            Args:
                split: the split of `--split`, by default "test".

            Returns:
                Rows as dictionaries, with the columns that a file would have, or the path of a file or directory.
            """
            return ()

    def choose_tools(self, request: Request) -> Sequence[Tool | McpServer]:
        """Return the tools of one rollout; by default all of `tools`. Only these are in the chat template and can be called.

        Called before the rollout is accepted, and for prompts that are rendered without a rollout (`RenderPrompt`), so it must be a
        quick plain `def` without side effects. Trainers of `POST /rollout` learn the tools from `GET /tools`, which lists `tools`.
        There, a request for which this method returns other tools is refused. A toolset that it returns must be in `tools`.

        Args:
            request: the start request, with its messages, metadata and labels.
        """
        return self.tools

    def check_attributes(self) -> None:
        """Check attributes whose rules depend on the class. Called after construction. Raises TypeError or ValueError."""
        if self.on_restart not in self._restarts:
            possible = ", ".join(map(repr, self._restarts))
            text = f"agent {self.name!r}: on_restart is {self.on_restart!r:.100}; it must be one of {possible}"
            if self._restarts == (END,):
                text += ", because the agent does not own its loop; replayable = True lets its rollouts be resumed"
            raise ValueError(text)

    def overrides(self, method: str) -> bool:
        """Return whether the agent has a `setup`, `cleanup`, `reward_group` or `dataset` of its own; the default is not called."""
        if method == "reward_group" and self.rubric is not None and self.rubric.scores_groups:
            return True
        return getattr(getattr(self, method), "__func__", None) is not getattr(Agent, method)

    async def run_setup(self, run: object) -> None:
        """Call `setup`; the runtime's entry point."""
        await call_method(self.setup, f"setup() of agent {self.name}", cast("Run", run))

    async def run_cleanup(self, run: object) -> None:
        """Call `cleanup`; the runtime's entry point."""
        await call_method(self.cleanup, f"cleanup() of agent {self.name}", cast("Run", run))

    async def perform(self, run: object) -> None:
        """Call `play`; the runtime's entry point."""
        await call_method(self.play, f"play() of agent {self.name}", cast("Run", run))

    async def judge(self, run: object) -> RewardResult:
        """Call `reward` and return its checked result; the runtime's entry point.

        Raises TypeError or ValueError if the result is not a reward.
        """
        value = await call_method(self.reward, f"reward() of agent {self.name}", cast("Run", run))
        where = f"agent {self.name!r}: reward"
        with with_location(self.reward):
            return self._checked_reward(value, where)

    async def judge_group(self, runs: Sequence[object]) -> Sequence[RewardResult | None]:
        """Call `reward_group` and return its checked result; the runtime's entry point.

        Raises TypeError or ValueError if the result is not one reward for each run.
        """
        own_runs = cast("Sequence[Run]", runs)
        values = as_list(await call_method(self.reward_group, f"reward_group() of agent {self.name}", own_runs))
        where = f"agent {self.name!r}: reward_group"
        with with_location(self.reward_group):
            if not isinstance(values, Sequence) or isinstance(values, str):
                raise TypeError(f"{where} returned {values!r:.100}; it must return a list with one reward for each run")
            if len(values) != len(runs):
                raise ValueError(
                    f"{where} returned {len(values)} rewards for {len(runs)} runs; return one for each run"
                )
            return [None if value is None else self._checked_reward(value, where) for value in values]

    def _checked_reward(self, value: object, where: str) -> RewardResult:
        result = checked_reward(value, where)
        if result.roles and self.reward_rule != RewardRule.OWN.value:
            text = f'rewards of roles reach samples only with reward_rule = "own", it is "{self.reward_rule}"'
            raise ValueError(f"{where} in a RewardResult: {text}")
        return result

    def tools_for(self, request: Request) -> Sequence[Tool]:
        """Call `choose_tools` and return its checked result; the runtime's entry point.

        Raises TypeError or ValueError if the result is not a list or tuple of tools.
        """
        chosen = self.choose_tools(request)
        with with_location(self.choose_tools):
            return self._offered(checked_tools(chosen, f"agent {self.name!r}: choose_tools"))

    @property
    def offered_tools(self) -> Sequence[Tool]:
        """`tools`, in which the tools of each toolset stand in its place; the runtime's access."""
        return self._offered(self.tools)

    @property
    def toolsets(self) -> Sequence[McpServer]:
        """The toolsets in `tools`; the runtime's access."""
        return [each for each in self.tools if isinstance(each, McpServer)]

    def list_toolsets(self, listed: Mapping[McpServer, Sequence[Tool]]) -> None:
        """Take the tools of the toolsets; the runtime's entry point. Raises ValueError if two tools have the same name."""
        object.__setattr__(self, "_listed", listed)
        _ = self.offered_tools

    def _offered(self, tools: Sequence[Tool | McpServer]) -> Sequence[Tool]:
        if not any(isinstance(each, McpServer) for each in tools):
            return cast("Sequence[Tool]", tools)
        offered: list[Tool] = []
        for each in tools:
            if not isinstance(each, McpServer):
                offered.append(each)
            elif each in self._listed:
                offered += self._listed[each]
            else:
                text = f"agent {self.name!r}: the tools of {each} are not known: it must be in `tools`, and a server must run"
                raise ValueError(text)
        check_names(offered, f"agent {self.name!r}")
        return offered


@contextmanager
def with_location(function: Callable[..., object]) -> Iterator[None]:
    """Append the source location of `function` to a TypeError, ValueError or AgentMistake that its result causes."""
    try:
        yield
    except (TypeError, ValueError, AgentMistake) as error:
        raise type(error)(f"{error}{written_at(function)}") from None


async def call_method(
    function: Callable[..., _T | Awaitable[_T]], name: str, run: Run | Sequence[Run], *arguments: object
) -> _T:
    """Call an author's method with `run` and `arguments`: on the event loop if it is a coroutine function, else in a thread.

    Return its result. `name` is for messages.
    """
    if inspect.iscoroutinefunction(function):
        return cast("_T", await function(run, *arguments))
    runner = run if isinstance(run, Run) else run[0]
    result = await runner.run_in_thread(f"{name}{written_at(function)}", lambda: function(run, *arguments))
    # A plain function may return an awaitable, for example a lambda or a wrapper around a coroutine function.
    return await cast("Awaitable[_T]", result) if inspect.isawaitable(result) else result


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
