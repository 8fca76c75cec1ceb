"""Executes tool calls. The errors of a tool become texts for the model. A tool that cannot be run at all ends the rollout."""

from __future__ import annotations

import asyncio
import json
import traceback
from collections.abc import Coroutine, Hashable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

from rollout_server.core.message import (
    ARGUMENTS,
    JSON,
    MAX_VALUES,
    MalformedMessage,
    Message,
    ToolCall,
    first_too_many,
    parse_json,
)
from rollout_server.core.outcome import Category, Failure
from rollout_server.core.spec import TokenizerName
from rollout_server.runtime.aio.event_loop import first_done
from rollout_server.runtime.aio.source_location import raised_at, waits_at, written_at
from rollout_server.runtime.errors import ArgumentError, RolloutEnded, RolloutFailed, ToolError, cause_of
from rollout_server.runtime.ports import Content, Tool
from rollout_server.runtime.programs import Programs
from rollout_server.runtime.tools.policy import ToolPolicy
from rollout_server.runtime.tools.protocols import (
    ServerRunTool,
    ToolContext,
    ToolFailed,
    ToolRunner,
    ToolUnavailable,
    Unwritable,
    is_idempotent,
    is_server_run,
)
from rollout_server.runtime.tools.remote_tool import RemoteTool
from rollout_server.runtime.tools.resources import ToolResources
from rollout_server.runtime.tools.slots import NoFreeSlot, Slots
from rollout_server.runtime.tools.task import TIMED_OUT, RemoteCalls, ToolTask
from rollout_server.runtime.tools.toolset import ToolsetCall, ToolsetSource
from rollout_server.runtime.tools.toolsets import RolloutToolsets
from rollout_server.runtime.tools.truncate import OutputLimit

_FLOODS = (
    "returned a result over the size limit: the model gets only its beginning; set max_output_tokens to choose a limit"
)
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 5.0
"""Backoff between attempts in seconds: the first wait, which doubles with each attempt, and the maximum."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a call. If `failed` is true, its content is an error text."""

    call: ToolCall
    content: Content
    failed: bool

    @property
    def text(self) -> str:
        """Concatenated texts of the content."""
        if isinstance(self.content, str):
            return self.content
        return "".join(text for part in self.content if isinstance(text := part.get("text"), str))

    def message(self) -> Message:
        """Return the tool message for the conversation."""
        return Message.write({"role": "tool", "content": self.content, "tool_call_id": self.call.id})


@dataclass(frozen=True, slots=True)
class _Scope:
    """For whom a call runs: the rollout, and how it calls tools of toolsets."""

    context: ToolContext | None
    remote: RemoteCalls | None


class ToolExecutor:
    """The tools of one agent in one rollout.

    Args:
        tools: the tools that can be called.
        resources: those of the server.
        tokenizer: measures the results.
        toolsets: the rollout's sessions with toolsets; None: their tools cannot be called.
    """

    def __init__(
        self,
        tools: Iterable[Tool],
        resources: ToolResources | None = None,
        tokenizer: TokenizerName | None = None,
        toolsets: RolloutToolsets | None = None,
    ) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._resources = resources or ToolResources()
        self._tokenizer = tokenizer
        self._toolsets = toolsets
        self._slots: dict[Hashable, Slots] = {}

    @property
    def tools(self) -> Sequence[Tool]:
        """The tools, in the given order."""
        return tuple(self._tools.values())

    @property
    def programs(self) -> Programs:
        """The server's access to programs."""
        return self._resources.programs

    def with_tools(self, tools: Iterable[Tool]) -> ToolExecutor:
        """Return an executor with other tools for another conversation of the rollout. Both share the rollout's slots."""
        other = ToolExecutor(tools, self._resources, self._tokenizer, self._toolsets)
        other._slots = self._slots
        return other

    def may_repeat(self, call: ToolCall) -> bool:
        """Return whether a call may run again after a crash: its tool is idempotent, knows its key, or does not exist."""
        tool = self._tools.get(call.name)
        if isinstance(tool, RemoteTool) and tool.runs_keys_once:
            return True
        return tool is None or is_idempotent(tool)

    async def run(self, call: ToolCall, context: ToolContext | None = None, key: str = "") -> ToolResult:
        """Run one call for the rollout `context`. `key` identifies it in the rollout, also in a later process; empty: nothing does.

        Raise only `RolloutEnded`, the caller's own cancellation, which no tool can delay, and `RolloutFailed` if the tool cannot
        be run at all or a further model that it called failed. The model could not have done better, so it gets no error text then.
        """
        tool = self._tools.get(call.name)
        try:
            content = await self._run(call, tool, self._scope(call, context, key))
            limited = await self._output_limit(tool).cut(content)
            if limited is not content and not _has_output_limit(tool):
                self._resources.warn_author(_label(call.name, tool), _FLOODS)
            return ToolResult(call, limited, failed=False)
        except (asyncio.CancelledError, RolloutEnded, RolloutFailed):
            raise
        except ToolUnavailable as error:
            self._warn_author(call.name, tool, error)
            raise RolloutFailed(Failure(Category.TOOL, f"tool {call.name} cannot be run: {error}")) from error
        except BaseException as error:  # the boundary to a tool author's code
            self._warn_author(call.name, tool, error)
            return ToolResult(call, await self._output_limit(tool).cut(f"Error: {_error_text(error)}"), failed=True)

    def _scope(self, call: ToolCall, context: ToolContext | None, key: str) -> _Scope:
        toolsets, uid = self._toolsets, context.uid if context is not None else ""
        if toolsets is None:
            return _Scope(context, None)
        call_key, idempotent = f"{uid}/{key or token_hex(10)}", is_idempotent(self._tools.get(call.name))

        async def remote(source: ToolsetSource, name: str, arguments: Mapping[str, JSON]) -> Content:
            return await toolsets.call(source, ToolsetCall(name, arguments, call_key, uid, call.id, idempotent))

        return _Scope(context, remote)

    async def _run(self, call: ToolCall, tool: Tool | None, scope: _Scope) -> Content:
        arguments = _arguments(call)
        if tool is None:
            raise ToolError(f"Unknown function '{call.name}'. Available: {list(self._tools)}")
        if not isinstance(arguments, Mapping):
            raise ToolError(
                f"Invalid arguments for {call.name}: a JSON object is needed, not {type(arguments).__name__}"
            )
        try:
            return await self._run_cached(tool, arguments, scope)
        except ArgumentError as error:
            raise ToolError(f"Invalid arguments for {call.name}: {error}") from None

    async def _run_cached(self, tool: Tool, arguments: Mapping[str, JSON], scope: _Scope) -> Content:
        if not (is_server_run(tool) and tool.policy.cache):
            return await self._run_in_slots(tool, arguments, scope)
        try:
            canonical = json.dumps(arguments, sort_keys=True, default=str)
        except (ValueError, RecursionError):  # such as integers with too many digits: the tool itself reports them
            return await self._run_in_slots(tool, arguments, scope)
        key, seconds = (tool, canonical), tool.policy.cache_seconds
        return await self._resources.results.get(
            key, 4 * len(canonical), seconds, lambda: self._run_in_slots(tool, arguments, scope)
        )

    async def _run_in_slots(self, tool: Tool, arguments: Mapping[str, JSON], scope: _Scope) -> Content:
        """Run the call once it has all the slots it needs."""
        if not is_server_run(tool):
            work = ToolTask(label_of(tool))
            return await self._run_with_timeout(tool, ToolPolicy(), work, tool.run(arguments))
        policy, label = tool.policy, label_of(tool)
        if isinstance(tool, RemoteTool) and self._toolsets is not None:
            await self._toolsets.open(tool.source)  # before the time limit of the call begins: it has one of its own
        slots = await self._acquire_slots(tool)
        if not policy.process or self._resources.processes is None:
            # From here on the task owns the slots and releases them itself, also if it outlives this call.
            work = ToolTask(label, slots, None, scope.context, scope.remote)
            return await self._run_with_timeout(tool, policy, work, _attempts(tool, work, arguments))
        async with AsyncExitStack() as stack:
            try:
                worker = await stack.enter_async_context(self._resources.processes.open(tool.definition, policy))
            except BaseException:
                for each in slots:
                    each.release()
                raise
            work = ToolTask(label, slots, worker, scope.context, scope.remote)
            return await self._run_with_timeout(tool, policy, work, _attempts(tool, work, arguments))

    async def _acquire_slots(self, tool: ServerRunTool) -> list[Slots]:
        taken: list[Slots] = []
        try:
            for slots, of_what in self._needed_slots(tool):
                try:
                    await slots.acquire()
                except NoFreeSlot:
                    lost = f"{slots.lost} of them by abandoned calls that never returned"
                    raise ToolError(f"{tool.name} cannot run: all {of_what} are in use, {lost}") from None
                taken.append(slots)
        except BaseException:
            for slots in taken:
                slots.release()
            raise
        return taken

    def _needed_slots(self, tool: ServerRunTool) -> Iterable[tuple[Slots, str]]:
        """Yield the slots that a call needs, each with a name for error texts.

        All calls acquire slots in this order (rollout, server, threads), so they cannot deadlock.
        """
        limit = tool.policy.concurrency
        if limit is not None:
            yield (
                self._slots.setdefault((tool.definition, tool.name, limit), Slots(limit)),
                "its slots in this rollout",
            )
        slots = self._resources.slots(tool)
        if slots is not None:
            yield slots, "its slots on this server"
        if tool.threaded and not tool.policy.process:
            yield self._resources.threads, "threads for plain functions"

    async def _run_with_timeout(
        self, tool: Tool, policy: ToolPolicy, work: ToolTask, coroutine: Coroutine[Any, Any, Content]
    ) -> Content:
        """Return the result. On timeout or cancellation, cancel the work and do not wait for it."""
        task = work.start(coroutine)
        try:
            await first_done(task, within=policy.timeout)
        except asyncio.CancelledError:
            work.cancel()
            raise
        if not task.done():
            self._resources.warn_author(label_of(tool), f"took longer than {policy.timeout:g} s{waits_at(task)}")
            work.cancel(TIMED_OUT)
            raise ToolError(f"{tool.name} took longer than {policy.timeout:g} s")
        if task.cancelled():
            raise ToolError("The tool was cancelled")
        return task.result()

    def _output_limit(self, tool: Tool | None) -> OutputLimit:
        limits = self._resources.limits
        tokens = tool.policy.max_output_tokens if is_server_run(tool) else None
        return OutputLimit(limits.output_bytes, limits.image_bytes, tokens, self._resources.measure, self._tokenizer)

    def _warn_author(self, name: str, tool: Tool | None, error: BaseException) -> None:
        """Log exception type, file and line. The exception's text is not logged: it may contain text from the model."""
        if isinstance(error, ToolError) and not isinstance(error, Unwritable):
            return
        label = _label(name, tool)
        if isinstance(error, Unwritable):
            self._resources.warn_author(label, "returned a value that cannot be written as text")
        else:
            self._resources.warn_author(label, _failure_text(error))


def label_of(tool: Tool) -> str:
    """Return a tool's name and source location, for the log."""
    if is_server_run(tool):
        return f"tool {tool.name} ({tool.definition})"
    return f"tool {tool.name}{written_at(tool.run)}"


def _label(name: str, tool: Tool | None) -> str:
    return label_of(tool) if tool is not None else f"tool {name}"


def _has_output_limit(tool: Tool | None) -> bool:
    """Return whether the tool's author set a limit for results."""
    return is_server_run(tool) and tool.policy.max_output_tokens is not None


async def _attempts(tool: ServerRunTool, runner: ToolRunner, arguments: Mapping[str, JSON]) -> Content:
    for attempt in range(tool.policy.retries):
        try:
            return await _attempt(tool, runner, arguments)
        except ToolError:
            raise
        except Exception:  # the last attempt, below, reports its error
            await asyncio.sleep(min(_FIRST_WAIT * 2**attempt, _LONGEST_WAIT))
    return await _attempt(tool, runner, arguments)


async def _attempt(tool: ServerRunTool, runner: ToolRunner, arguments: Mapping[str, JSON]) -> Content:
    try:
        return await tool.run_by(runner, arguments)
    except BaseExceptionGroup as group:  # of an author's TaskGroup; the model and the rollout need the error in it
        raise cause_of(group) from None


def _error_text(error: BaseException) -> str:
    try:
        text = f"KeyError: {error}" if isinstance(error, KeyError) else str(error)  # its own text is only the key
        return text or type(error).__name__
    except Exception:  # `__str__` is the author's code, too
        return type(error).__name__


def _failure_text(error: BaseException) -> str:
    if isinstance(error, ToolFailed):
        return f"ended with {error.kind or 'an error'}" + (
            f" at {error.location}" if error.location else raised_at(error)
        )
    frames = traceback.extract_tb(error.__traceback__)
    innermost = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"raised {type(error).__name__}{raised_at(error) or innermost}"


def _arguments(call: ToolCall) -> JSON:
    """Return the parsed arguments. Engines write the arguments of a call without any as an empty text or null, too."""
    if not isinstance(call.arguments, str):
        return call.arguments
    if first_too_many([call.arguments]) is not None:
        raise ToolError(f"Invalid JSON arguments: more than {MAX_VALUES:,} values")
    try:
        value = parse_json(call.arguments, ARGUMENTS) if call.arguments.strip() else {}
    except MalformedMessage as error:
        raise ToolError(f"Invalid JSON arguments: {error}") from None
    return {} if value is None or value == "" else value
