"""Agents that are one function, which gets clients of its rollout's model endpoint."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, Final, Unpack, overload

from rollout_server.agent.base import with_location
from rollout_server.agent.own_loop import RESULT, AgentOptions, OwnLoopAgent, check_not_over, reachable, task_of
from rollout_server.runtime.aio.source_location import written_at
from rollout_server.runtime.capture.endpoint import ModelAccess
from rollout_server.runtime.run.reward import checked_reward
from rollout_server.runtime.run.run import Run

_CLIENTS: Final = {
    "openai": ("openai", "OpenAI", "AsyncOpenAI"),
    "anthropic": ("anthropic", "Anthropic", "AsyncAnthropic"),
    "http": ("httpx", "Client", "AsyncClient"),
}
"""Module, synchronous class and asynchronous class of each client, by the name of its parameter."""
_ARGUMENTS: Final = (*_CLIENTS, "task", "metadata", "model", "access", "run")


class FunctionAgent(OwnLoopAgent):
    """An agent that is one function: its loop, with clients of the model endpoint. `own_loop` creates it.

    The function gets the arguments that its parameters name:

    - `openai`, `anthropic`: clients of these packages, which must be installed.
    - `http`: a client of httpx with the key and the base URL, for paths such as "chat/completions". It repeats calls that an
      overloaded server refuses, as the other clients do.
    - `task`: the text of the request's last user message. `metadata`: the request's metadata.
    - `model`: the name of the model for the clients.
    - `access`: base URL and key, for other clients, and the URL of an MCP server with `tools`. `run`: the rollout.

    An `async def` gets asynchronous clients. A plain `def` gets synchronous ones and runs in a thread.

    It returns the reward, a `RewardResult`, or None; then the rubric computes the reward. An exception ends the rollout as a
    failure.
    """

    description = ""

    def __init__(self, function: Callable[..., Any], **options: Unpack[AgentOptions]) -> None:
        """Raises TypeError, with file and line, for a function that cannot be called with these arguments."""
        self.function = function
        self._parameters = _parameters(function)
        description = inspect.cleandoc(function.__doc__ or "")
        self._set({"name": getattr(function, "__name__", ""), "description": description, **options})

    def start(self) -> None:
        """Import the clients, so that a server without one of them does not start."""
        for name in self._parameters:
            if name in _CLIENTS:
                package = _CLIENTS[name][0]
                try:
                    importlib.import_module(package)
                except ModuleNotFoundError as error:
                    text = f"{error.name} is not installed, and its parameter {name!r} needs it: pip install {package}"
                    raise ModuleNotFoundError(text, name=error.name) from None

    async def play(self, run: Run) -> None:
        """Call the function. An end of the rollout is no error of a function whose calls are refused then."""
        async with run.capture(self.capture) as capture, AsyncExitStack() as stack:
            access = reachable(capture.access, self.name)
            arguments = {name: self._argument(name, run, access, stack) for name in self._parameters}
            try:
                value = await self._call(run, arguments)
            except Exception:
                check_not_over(run)
                raise
        check_not_over(run)
        with with_location(self.function):
            result = checked_reward(value, f"agent {self.name!r}: its function")
        if value is not None:
            run.state[RESULT] = result

    async def _call(self, run: Run, arguments: dict[str, Any]) -> object:
        if inspect.iscoroutinefunction(self.function):
            return await self.function(**arguments)
        name = f"agent {self.name}{written_at(self.function)}"
        value = await run.run_in_thread(name, lambda: self.function(**arguments))
        return await value if inspect.isawaitable(value) else value

    def _argument(self, name: str, run: Run, access: ModelAccess, stack: AsyncExitStack) -> object:
        """Return an argument. A client is closed with the stack."""
        match name:
            case "task":
                return task_of(run)
            case "metadata":
                return run.metadata
            case "model":
                return self.capture.model
            case "access":
                return access
            case "run":
                return run
        is_async = inspect.iscoroutinefunction(self.function)
        base_url = access.base_url if name == "anthropic" else f"{access.base_url}/v1"
        from rollout_server.agent.http_clients import http_client, tls_context  # imports httpx

        if name == "http":
            client: Any = http_client(base_url, access.key, is_async=is_async)
        else:
            package, *classes = _CLIENTS[name]
            module = importlib.import_module(package)
            http_class = module.DefaultAsyncHttpxClient if is_async else module.DefaultHttpxClient
            client_class = getattr(module, classes[is_async])
            client = client_class(base_url=base_url, api_key=access.key, http_client=http_class(verify=tls_context()))
        if is_async:
            stack.push_async_exit(client)
        else:
            stack.callback(client.close)
        return client


@overload
def own_loop(function: Callable[..., Any], /) -> FunctionAgent: ...
@overload
def own_loop(**options: Unpack[AgentOptions]) -> Callable[[Callable[..., Any]], FunctionAgent]: ...
def own_loop(
    function: Callable[..., Any] | None = None, /, **options: Unpack[AgentOptions]
) -> FunctionAgent | Callable[[Callable[..., Any]], FunctionAgent]:
    """Make a function an agent: `@own_loop`, or with options `@own_loop(limits=Limits(turns=20))`. See `FunctionAgent`.

    The name of the agent is that of the function, and its description the function's docstring.
    """
    if function is not None:
        return FunctionAgent(function, **options)
    return lambda each: FunctionAgent(each, **options)


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the arguments that a function wants. Raise TypeError for others."""
    names: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in _ARGUMENTS and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            names.append(parameter.name)
        elif parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            text = f"its parameter {parameter.name!r} is none of {', '.join(_ARGUMENTS)}"
            raise TypeError(f"{getattr(function, '__name__', function)}: {text}{written_at(function)}")
    return tuple(names)
