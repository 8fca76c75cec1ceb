"""Tools made from functions."""

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
from rollout_server.runtime.tools.process_context import context_json
from rollout_server.runtime.tools.protocols import ToolContext, ToolDefinition, ToolRunner, Unwritable, unwritable
from rollout_server.runtime.tools.task import ToolTask
from rollout_server.tool.argument_errors import one_line
from rollout_server.tool.docstring import read_docstring
from rollout_server.tool.parameters import Parameters
from rollout_server.tool.result import content_of

P = ParamSpec("P")
R = TypeVar("R")

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Policy(TypedDict, total=False):
    """The keyword arguments of `tool`: the fields of `ToolPolicy`, which documents them."""

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
    """A tool made from a function. Calling the object calls the function, without validation.

    Args:
        name: the function's name.
        description: the text of its docstring, without the sections on parameters.
        parameters_json_schema: JSON Schema of the arguments object, as JSON text.
        function: coroutine functions run on the event loop, plain ones in a thread; with `process` in the policy, both in a
            process.
        policy: timeout, retries, concurrency and the other rules for its calls.
        definition: module, file and line of the function.
    """

    name: str
    description: str
    parameters_json_schema: str
    function: Callable[P, R] = field(repr=False)
    policy: ToolPolicy = field(repr=False)
    definition: ToolDefinition = field(repr=False)
    _parameters: Parameters = field(repr=False)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function directly."""
        return self.function(*args, **kwargs)

    @property
    def threaded(self) -> bool:
        """Whether the function is a plain `def`, which runs in a thread."""
        return not inspect.iscoroutinefunction(self.function)

    async def run(self, arguments: Mapping[str, JSON], context: ToolContext | None = None) -> Content:
        """Run one call outside a server, without its policy. Not possible for a tool with `process=True`.

        `context` is passed for the parameters annotated `Run` or `ToolContext`; any object with the members that the tool uses.

        Raises `ArgumentError` for invalid arguments, `ToolError` for a result that cannot be serialised, and TypeError for a
        missing context.
        """
        return await self.run_by(ToolTask(f"tool {self.name}", context=context), arguments)

    async def run_by(self, runner: ToolRunner, arguments: Mapping[str, JSON]) -> Content:
        """Run one call with the threads and processes of `runner`. Raises as `run` does."""
        bound = self._bind(arguments, runner.context)
        if self.policy.process:
            context = runner.context if self._parameters.context else None
            return await runner.in_process(arguments, context_json(self.name, context) if context is not None else "")
        result = await runner.in_thread(functools.partial(self._call, bound)) if self.threaded else self._call(bound)
        return await self._await_content(result) if inspect.isawaitable(result) else cast("Content", result)

    def run_here(self, arguments: Mapping[str, JSON], context: ToolContext | None = None) -> Content:
        """Run one call in this thread, regardless of the policy; a tool process calls this. Raises as `run` does."""
        result = self._call(self._bind(arguments, context))
        return asyncio.run(self._await_content(result)) if inspect.isawaitable(result) else cast("Content", result)

    def _bind(self, arguments: Mapping[str, JSON], context: ToolContext | None) -> dict[str, object]:
        """Return the validated arguments and the context, by parameter."""
        bound, names = self._parameters.bind(arguments), self._parameters.context
        if names and context is None:
            text = f"tool {self.name!r}: parameter {names[0]} needs the rollout, and this call has none; pass one: "
            raise TypeError(f"{text}`await {self.name}.run(arguments, context)` ({self.definition})")
        return bound | dict.fromkeys(names, context)

    async def _await_content(self, awaitable: Awaitable[object]) -> Content:
        result = await awaitable
        return self._content(await result if inspect.isawaitable(result) else result)

    def _call(self, bound: dict[str, object]) -> object:
        """Call the function. Return its content, serialised in this thread, or the awaitable that the function returned."""
        result = cast("Callable[..., object]", self.function)(**bound)
        return result if inspect.isawaitable(result) else self._content(result)

    def _content(self, result: object) -> Content:
        try:
            return content_of(result)
        except (ValueError, TypeError, RecursionError) as error:
            why = "too many digits" if isinstance(result, int) else one_line(str(error))
            raise Unwritable(f"{unwritable(self.name)}: {why}") from None


@overload
def tool(function: Callable[P, R], /) -> FunctionTool[P, R]: ...


@overload
def tool(**policy: Unpack[Policy]) -> Callable[[Callable[P, R]], FunctionTool[P, R]]: ...


def tool(
    function: Callable[P, R] | None = None, /, **policy: Unpack[Policy]
) -> FunctionTool[P, R] | Callable[[Callable[P, R]], FunctionTool[P, R]]:
    """Turn a function into a tool: `@tool`, or `@tool(timeout=5, ...)` with the fields of `ToolPolicy`.

    The function's name and docstring become the tool's name and description, its annotations the JSON Schema of the parameters. To
    describe a parameter, use `Annotated[int | float, "First number"]`, pydantic's `Field(description=...)`, or a docstring section
    in Google, NumPy or Sphinx style.

    A parameter annotated `Run` or `ToolContext` gets the rollout that calls the tool. The model does not see it.

    The result may be a text, a number, an `Image`, or any value that pydantic serialises as JSON. A `ToolError` or another
    exception becomes an error text for the model, and the rollout continues.

    Args:
        function: a coroutine function, which runs on the event loop and must not block it, or a plain one, which runs in a thread.
        policy: timeout, retries, concurrency, cache, process and further rules; see `ToolPolicy`.

    Raises:
        TypeError: if the function cannot be a tool, for example because a parameter has no annotation; or for an unknown keyword.
        ValueError: if fields of the policy contradict each other.
    """
    unknown = sorted(set(policy) - set(Policy.__annotations__))
    if unknown:
        raise TypeError(
            f"@tool takes no {unknown[0]!r}; it takes {', '.join(Policy.__annotations__)}. Name and description are the function's"
        )
    if function is None:
        rules = ToolPolicy(**policy)
        return lambda function: _make_tool(function, rules)
    if isinstance(function, FunctionTool) and not policy:
        return function
    return _make_tool(function, ToolPolicy(**policy))


def _make_tool(function: Callable[P, R], policy: ToolPolicy) -> FunctionTool[P, R]:
    if isinstance(function, FunctionTool):
        raise TypeError(
            f"tool {function.name!r} is already a tool; set its policy where it is defined ({function.definition})"
        )
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        hint = "; write @staticmethod above @tool" if isinstance(function, staticmethod) else ""
        raise TypeError(f"@tool needs a function or a method, not {function!r}{hint}")
    name, definition = function.__name__, _definition(function)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"tool {name!r} must not be a generator: it contains `yield`; return the result ({definition})")
    if not _NAME.fullmatch(name):
        raise TypeError(f"tool {name!r}: a name has 1 to 64 letters, digits, _ or - ({definition})")
    if policy.process and (inspect.ismethod(function) or "<" in function.__qualname__):
        kind = (
            "a method of an object"
            if inspect.ismethod(function)
            else f"defined inside {definition.name.split('.<')[0]}"
        )
        text = (
            f"a process imports its tool by name, and this function is {kind}; define it at the top level of a module"
        )
        raise ValueError(f"tool {name!r}: {text} ({definition})")
    try:
        description = read_docstring(function)
        parameters = Parameters(function, description.parameters)
        (description.text + parameters.json_schema).encode()  # raises for lone surrogates, which cannot be sent
    except (PydanticUserError, PydanticUndefinedAnnotation, TypeError, ValueError) as error:
        raise TypeError(f"tool {name!r}: {error} ({definition})") from error
    if policy.cache and parameters.context:
        text = f"cache shares results between rollouts, and parameter {parameters.context[0]} differs between them"
        raise ValueError(f"tool {name!r}: {text}; remove one of the two ({definition})")
    return FunctionTool(name, description.text, parameters.json_schema, function, policy, definition, parameters)


def _definition(function: Callable[..., object]) -> ToolDefinition:
    """Return where the author wrote the function, looking through decorators that set `__wrapped__`."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    file, line = (code.co_filename, code.co_firstlineno) if code is not None else ("an unknown place", 0)
    return ToolDefinition(function.__module__, function.__qualname__, file, line)
