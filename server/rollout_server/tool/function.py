"""Tools made of functions."""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, ParamSpec, TypedDict, TypeVar, Unpack, cast, overload

from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError

from rollout_server.core.message import JSON
from rollout_server.runtime.ports import Content
from rollout_server.runtime.tools.policy import ToolPolicy
from rollout_server.runtime.tools.protocols import ToolDefinition, ToolRunner, Unwritable
from rollout_server.runtime.tools.task import ToolTask
from rollout_server.tool.argument_errors import one_line
from rollout_server.tool.docstring import described
from rollout_server.tool.parameters import Parameters
from rollout_server.tool.result import content_of

P = ParamSpec("P")
R = TypeVar("R")

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Policy(TypedDict, total=False):
    """The keywords of `tool`: the fields of a `ToolPolicy`, which says what they mean."""

    timeout: float | None
    retries: int
    concurrency: int | None
    server_concurrency: int | None
    idempotent: bool
    max_output_tokens: int | None
    cache: bool
    cache_seconds: float | None
    process: bool | Literal["fresh"]
    memory_bytes: int | None
    cpu_seconds: float | None
    environment: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class FunctionTool(Generic[P, R]):
    """A tool made of a function, which it still is: calling it calls the function, unchecked.

    Args:
        name: the function's name.
        description: the text of its docstring, without what it says of parameters.
        parameters_json_schema: JSON Schema of the arguments object, as JSON text.
        function: what runs: a coroutine function on the event loop, any other in a thread, both in a process if the policy
            says so.
        policy: how its calls are run.
        definition: where the function is defined.
    """

    name: str
    description: str
    parameters_json_schema: str
    function: Callable[P, R] = field(repr=False)
    policy: ToolPolicy = field(repr=False)
    definition: ToolDefinition = field(repr=False)
    _parameters: Parameters = field(repr=False)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function itself."""
        return self.function(*args, **kwargs)

    @property
    def threaded(self) -> bool:
        """The function is a plain one."""
        return not inspect.iscoroutinefunction(self.function)

    async def run(self, arguments: Mapping[str, JSON]) -> Content:
        """Runs one call outside a server, where nothing of its policy holds; a tool that wants a process has none there.

        Raises `ArgumentError` for wrong arguments, `ToolError` for a result that cannot be written.
        """
        return await self.run_by(ToolTask(f"tool {self.name}"), arguments)

    async def run_by(self, runner: ToolRunner, arguments: Mapping[str, JSON]) -> Content:
        """Runs one call as `run` does, by the runner."""
        bound = self._parameters.bind(arguments)
        if self.policy.process:
            return await runner.in_process(arguments)
        made = await runner.in_thread(functools.partial(self._made, bound)) if self.threaded else self._made(bound)
        return await self._awaited(made) if inspect.isawaitable(made) else cast("Content", made)

    def run_here(self, arguments: Mapping[str, JSON]) -> Content:
        """Runs one call in this thread, whatever its policy: what its process does. Raises as `run` does."""
        made = self._made(self._parameters.bind(arguments))
        return asyncio.run(self._awaited(made)) if inspect.isawaitable(made) else cast("Content", made)

    async def _awaited(self, awaitable: Awaitable[object]) -> Content:
        result = await awaitable
        return self._content(await result if inspect.isawaitable(result) else result)

    def _made(self, bound: dict[str, object]) -> object:
        """The content, written in this thread, too; or what is to be awaited for it."""
        result = cast("Callable[..., object]", self.function)(**bound)
        return result if inspect.isawaitable(result) else self._content(result)

    def _content(self, result: object) -> Content:
        try:
            return content_of(result)
        except (ValueError, TypeError, RecursionError) as error:
            why = "too many digits" if isinstance(result, int) else one_line(str(error))
            raise Unwritable(f"The result of {self.name} cannot be written: {why}") from None


@overload
def tool(function: Callable[P, R], /) -> FunctionTool[P, R]: ...


@overload
def tool(**policy: Unpack[Policy]) -> Callable[[Callable[P, R]], FunctionTool[P, R]]: ...


def tool(
    function: Callable[P, R] | None = None, /, **policy: Unpack[Policy]
) -> FunctionTool[P, R] | Callable[[Callable[P, R]], FunctionTool[P, R]]:
    """Makes a tool of a coroutine function or of a plain one: `@tool`, or `@tool(timeout=5)` with fields of a `ToolPolicy`.

    A parameter is described to the model by a text in its annotation, `Annotated[int | float, "First number"]`, by pydantic's
    `Field(description=...)`, or in the docstring, in the style of Google, NumPy or Sphinx.

    Raises:
        TypeError: for a function that cannot be a tool, and for a word that is not in a policy.
        ValueError: for a policy that makes no sense.
    """
    unknown = sorted(set(policy) - set(Policy.__annotations__))
    if unknown:
        raise TypeError(
            f"@tool takes no {unknown[0]!r}; it takes {', '.join(Policy.__annotations__)}. Name and description are the function's"
        )
    if function is None:
        rules = ToolPolicy(**policy)
        return lambda function: _made_of(function, rules)
    if isinstance(function, FunctionTool) and not policy:
        return function
    return _made_of(function, ToolPolicy(**policy))


def _made_of(function: Callable[P, R], policy: ToolPolicy) -> FunctionTool[P, R]:
    if isinstance(function, FunctionTool):
        raise TypeError(
            f"tool {function.name!r} is one already: its policy is given where it is made ({function.definition})"
        )
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        raise TypeError(f"a tool is made of a function, not of {function!r}")
    name, definition = function.__name__, _definition(function)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"tool {name!r} must return, it has a `yield` ({definition})")
    if not _NAME.fullmatch(name):
        raise TypeError(f"tool {name!r}: a name has 1 to 64 letters, digits, _ or - ({definition})")
    if policy.process and (inspect.ismethod(function) or "<" in function.__qualname__):
        kind = (
            "a method of an object"
            if inspect.ismethod(function)
            else f"defined inside {definition.name.split('.<')[0]}"
        )
        text = f"a process imports its tool, and this function is {kind}; put it at the top of a module"
        raise ValueError(f"tool {name!r}: {text} ({definition})")
    try:
        words = described(function)
        parameters = Parameters(function, words.parameters)
        (words.text + parameters.json_schema).encode()  # halves of surrogate pairs cannot be sent
    except (PydanticUserError, PydanticUndefinedAnnotation, TypeError, ValueError) as error:
        raise TypeError(f"tool {name!r}: {error} ({definition})") from error
    return FunctionTool(name, words.text, parameters.json_schema, function, policy, definition, parameters)


def _definition(function: Callable[..., object]) -> ToolDefinition:
    """Of the function that the author wrote, behind decorators that say what they wrap."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    file, line = (code.co_filename, code.co_firstlineno) if code is not None else ("an unknown place", 0)
    return ToolDefinition(function.__module__, function.__qualname__, file, line)
