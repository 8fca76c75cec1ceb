"""Rubrics: weighted reward functions that choose their arguments by parameter name, as in verifiers."""

from __future__ import annotations

import asyncio
import inspect
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from rollout_server.core.outcome import Category, Failure, FailureClass, RewardResult
from rollout_server.core.spec_validation import ID_LENGTH, MAX_SECONDS
from rollout_server.runtime.aio.source_location import authors_frames, raised_at, written_at
from rollout_server.runtime.errors import AgentMistake, RewardFailed, RolloutEnded, RolloutFailed, cause_of
from rollout_server.runtime.run.messages import text_of
from rollout_server.runtime.run.reward import as_list, score_number
from rollout_server.runtime.run.run import Run

ARGUMENTS: Final = ("run", "prompt", "completion", "response", "answer", "state", "metadata")
_GROUP: Final = "runs"
_MOST_FUNCTIONS: Final = 100
_FRAMES: Final = 8
_LEFT_OUT: Final = "%s; its score is left out, because it is optional"
OPTIONAL_FAILED: Final = "reward_function_failed"
"""Code of the note about an optional reward function that failed."""


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """One function of a rubric; see `Rubric.add`."""

    function: Callable[..., Any]
    name: str
    weight: float
    timeout: float
    optional: bool
    parameters: tuple[str, ...]
    location: str

    @property
    def label(self) -> str:
        """Name, file and line, for errors."""
        return f"reward function {self.name!r}{self.location}"


class Rubric:
    """A reward made of weighted functions, each of which returns a score: `Rubric(funcs=[exact, short], weights=[1.0, 0.2])`.

    As the class attribute `rubric` of an agent it computes the reward: the sum of weight times score. Each score is kept under its
    function's name. The functions run concurrently, coroutine functions on the event loop and plain functions in threads. Each
    gets the arguments that its parameters name:

    - `run`: the rollout.
    - `prompt`: the messages of the request. `completion`: the messages after them, tool results included.
    - `response`: the text of the model's last message.
    - `answer`: the metadata's "ground_truth", or else its "answer"; None if it has neither.
    - `state`, `metadata`: those of the rollout.
    - `runs`: all completed rollouts of the group, for ranking them. The function returns a list with one score for each.

    A function that raises, exceeds its timeout or returns something else than a finite number ends the rollout as a failure that
    names the function: a bug or an infrastructure failure is never a reward of 0. With `optional=True` it only leaves its score
    out, and the rollout gets the note `reward_function_failed`.

    A rubric that an agent has cannot be changed any more; a subclass extends a copy: `rubric = Base.rubric.copy().add(polite)`.

    Args:
        funcs: the functions.
        weights: one weight per function; by default 1.0 each. A weight of 0 keeps the score without changing the reward.
        timeout: seconds for each function.
    """

    def __init__(
        self,
        funcs: Sequence[Callable[..., Any]] = (),
        weights: Sequence[float] | None = None,
        *,
        timeout: float = 60.0,
    ) -> None:
        """Raises TypeError or ValueError, with file and line, for a function that cannot be called with these arguments."""
        if weights is not None and len(weights) != len(funcs):
            raise ValueError(f"Rubric has {len(funcs)} funcs and {len(weights)} weights; give one weight per function")
        self._timeout = timeout
        self._owner = ""
        self._functions: list[RewardFunction] = []
        for index, function in enumerate(funcs):
            self.add(function, 1.0 if weights is None else weights[index])

    def add(
        self,
        func: Callable[..., Any],
        weight: float = 1.0,
        *,
        timeout: float | None = None,
        name: str | None = None,
        optional: bool = False,
    ) -> Self:
        """Add a function and return the rubric.

        Args:
            func: the function, or any other callable, such as a `Judge`.
            weight: factor of its score in the reward.
            timeout: seconds; None: the rubric's.
            name: name of its score; by default the function's name, or the callable's attribute `name`.
            optional: whether the rollout continues without this score if the function fails.

        Raises AgentMistake if the rubric is that of an agent, whose reward would change unseen.
        """
        if self._owner:
            text = f"it is the rubric of {self._owner}, which would change, too; use rubric.copy().add(...)"
            raise AgentMistake(f"Rubric.add: {text}")
        seconds = self._timeout if timeout is None else timeout
        chosen = name or getattr(func, "__name__", None) or getattr(func, "name", None)
        added = RewardFunction(func, str(chosen), weight, seconds, optional, _parameters(func), _location(func))
        _check(added, [each.name for each in self._functions])
        self._functions.append(added)
        return self

    def copy(self) -> Self:
        """Return a rubric with the same functions, to which others can be added."""
        copied = copy(self)
        copied._functions, copied._owner = list(self._functions), ""
        return copied

    def belong_to(self, owner: str) -> None:
        """Refuse further functions from now on. `owner` is the agent's class, for the error."""
        self._owner = self._owner or owner

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the scores, in order."""
        return tuple(each.name for each in self._functions)

    @property
    def scores_groups(self) -> bool:
        """Whether it has a function of a whole group, with the parameter `runs`."""
        return any(_GROUP in each.parameters for each in self._functions)

    async def score(self, run: Run) -> RewardResult:
        """Return the reward and the scores of the functions of one rollout. Raises `RewardFailed`."""
        functions = [each for each in self._functions if _GROUP not in each.parameters]
        arguments = _arguments(run)
        scores = await _all(functions, lambda each: _score(each, _chosen(each, arguments), run))
        return _combined(RewardResult(), [(each, score) for each, score in scores if score is not None])

    async def score_group(self, runs: Sequence[Run], rewards: Sequence[RewardResult]) -> Sequence[RewardResult]:
        """Return the rewards of a group's rollouts: those so far, with the scores of the group's functions added.

        Raises `RewardFailed`. A rollout without a reward so far has that of the group's functions.
        """
        if not runs:
            return rewards
        functions = [each for each in self._functions if _GROUP in each.parameters]
        scored = await _all(functions, lambda each: _group_scores(each, runs))
        return [
            _combined(reward, [(each, scores[index]) for each, scores in scored if scores is not None])
            for index, reward in enumerate(rewards)
        ]


def _location(function: Callable[..., Any]) -> str:
    """Return the file and line of a function as " (file.py:3)"; of other callables, those at which they were added."""
    if inspect.isroutine(function):
        return written_at(function)
    frames = authors_frames(traceback.extract_stack(limit=_FRAMES))
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the arguments that a function wants. Raises TypeError for parameters that a rubric has not."""
    wanted: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            wanted += [name for name in ARGUMENTS if name not in wanted]
        elif parameter.name in (*ARGUMENTS, _GROUP) and parameter.kind is not parameter.POSITIONAL_ONLY:
            wanted.append(parameter.name)
        elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL:
            known = ", ".join((*ARGUMENTS, _GROUP))
            raise TypeError(
                f"reward function: its parameter {parameter.name!r} is none of {known}{_location(function)}"
            )
    if _GROUP not in wanted:
        return tuple(wanted)
    others = [name for name in wanted if name != _GROUP and _is_required(function, name)]
    if others:
        text = f"its parameter {others[0]!r} is not available together with {_GROUP!r}; each run has it"
        raise TypeError(f"reward function: {text}{_location(function)}")
    return (_GROUP,)


def _is_required(function: Callable[..., Any], name: str) -> bool:
    parameter = inspect.signature(function).parameters.get(name)
    return parameter is not None and parameter.default is parameter.empty


def _check(added: RewardFunction, names: Sequence[str]) -> None:
    if not added.name.strip() or added.name in ("None", "<lambda>") or len(added.name) > ID_LENGTH:
        raise ValueError(f"{added.label}: give its score a name of at most {ID_LENGTH} characters: name=...")
    if added.name in names:
        raise ValueError(f"{added.label}: the rubric already has a score of this name; give it another: name=...")
    if isinstance(added.weight, bool) or not isinstance(added.weight, int | float) or not math.isfinite(added.weight):
        raise TypeError(f"{added.label}: the weight is {added.weight!r}; it must be a finite number")
    if isinstance(added.timeout, bool) or not isinstance(added.timeout, int | float):
        raise TypeError(f"{added.label}: the timeout is {added.timeout!r}; it must be a number of seconds")
    if not 0 < added.timeout <= MAX_SECONDS:
        raise ValueError(
            f"{added.label}: the timeout is {added.timeout!r}; it must be above 0, at most {MAX_SECONDS:,} s"
        )
    if len(names) >= _MOST_FUNCTIONS:
        raise ValueError(f"a rubric has at most {_MOST_FUNCTIONS} functions")


def _arguments(run: Run) -> Mapping[str, Any]:
    prompt, messages, metadata = list(run.request.messages), run.messages, run.metadata
    # A compaction has other messages than the request: then all of them are the completion.
    completion = messages[len(prompt) :] if messages[: len(prompt)] == prompt else messages
    return {
        "run": run,
        "prompt": prompt,
        "completion": list(completion),
        "response": next((text_of(each.get("content")) for each in reversed(messages) if _is_reply(each)), ""),
        "answer": metadata.get("ground_truth", metadata.get("answer")),
        "state": run.state,
        "metadata": metadata,
    }


def _is_reply(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "assistant"


def _chosen(function: RewardFunction, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: arguments[name] for name in function.parameters}


async def _all(
    functions: Sequence[RewardFunction], call: Callable[[RewardFunction], Any]
) -> Sequence[tuple[RewardFunction, Any]]:
    """Call all functions concurrently and return their results in order. After the first failure the others are cancelled."""
    tasks = [asyncio.create_task(call(each), name=f"score {each.name}") for each in functions]
    try:
        return list(zip(functions, await asyncio.gather(*tasks), strict=True))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _score(function: RewardFunction, arguments: Mapping[str, Any], run: Run) -> float | None:
    """Return a score; None if an optional function failed. Raises `RewardFailed`."""
    try:
        return _number(function, await _result(function, arguments, run))
    except RewardFailed as failed:
        if not function.optional:
            raise
        _note(run, failed)
        return None


async def _group_scores(function: RewardFunction, runs: Sequence[Run]) -> Sequence[float] | None:
    try:
        values = as_list(await _result(function, {_GROUP: runs}, runs[0]))
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(runs):
            text = f"{function.label} returned {values!r:.100}; it must return a list of {len(runs)} numbers, one per rollout"
            raise RewardFailed(Failure(Category.INTERNAL, text, source=FailureClass.ENVIRONMENT))
        return [_number(function, value) for value in values]
    except RewardFailed as failed:
        if not function.optional:
            raise
        runs[0].logger.warning(_LEFT_OUT, failed, exc_info=failed.__cause__)
        return None


async def _call(function: RewardFunction, arguments: Mapping[str, Any], run: Run) -> Any:
    called = function.function
    try:
        if inspect.iscoroutinefunction(called) or inspect.iscoroutinefunction(getattr(called, "__call__", None)):  # noqa: B004
            return await called(**arguments)
        result = await run.run_in_thread(function.label, lambda: called(**arguments))
        return await result if inspect.isawaitable(result) else result
    except BaseExceptionGroup as group:  # of an author's TaskGroup
        raise cause_of(group) from None


async def _result(function: RewardFunction, arguments: Mapping[str, Any], run: Run) -> Any:
    """Call a function within its timeout. Raises `RewardFailed`, whose text has the function but not the exception's text."""
    timer = asyncio.timeout(function.timeout)
    try:
        async with timer:
            return await _call(function, arguments, run)
    except RolloutFailed as failed:  # a further model that the function calls
        text = f"{function.label}: {failed.failure.message}"
        raise RewardFailed(replace(failed.failure, message=text)) from failed
    # The boundary to an author's code. SystemExit and RolloutEnded would not name the function, and miss `optional`.
    except (Exception, SystemExit, KeyboardInterrupt, RolloutEnded) as error:
        what = f"raised {type(error).__name__}{raised_at(error)}"
        if isinstance(error, TimeoutError) and timer.expired():
            what = f"did not return within {function.timeout:g} s"
        if isinstance(error, RolloutEnded):
            what = f"used a method of run that is not possible in a reward{raised_at(error)}"
        if isinstance(error, AgentMistake):  # this package's own text, such as an unknown name of a model
            what = f"{what}: {error}"
        text = f"{function.label} {what}; the server's log has the traceback"
        raise RewardFailed(Failure(Category.INTERNAL, text, run.turn, source=FailureClass.ENVIRONMENT)) from error


def _number(function: RewardFunction, value: object) -> float:
    """Return a score as a float. Raises `RewardFailed`."""
    try:
        number = score_number(value)
    except TypeError:
        number = math.nan
    if not math.isfinite(number):
        text = f"{function.label} returned {value!r:.100}; it must return a finite number"
        raise RewardFailed(Failure(Category.INTERNAL, text, source=FailureClass.ENVIRONMENT))
    return number


def _note(run: Run, failed: RewardFailed) -> None:
    run.logger.warning(_LEFT_OUT, failed, exc_info=failed.__cause__)
    run.note(OPTIONAL_FAILED, str(failed))


def _combined(before: RewardResult, scored: Sequence[tuple[RewardFunction, float]]) -> RewardResult:
    if not scored:
        return before
    reward = sum((each.weight * score for each, score in scored), before.reward or 0.0)
    return replace(before, reward=reward, scores={**(before.scores or {}), **dict(_named(scored))})


def _named(scored: Sequence[tuple[RewardFunction, float]]) -> Iterator[tuple[str, float]]:
    return ((each.name, score) for each, score in scored)
