"""Adapter that runs an agent loop of the earlier SDK as an `Agent`."""

from __future__ import annotations

import inspect
import json
import logging
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_server.agent import Agent
from rollout_server.core.message import JSON
from rollout_server.core.outcome import Category, Failure, FailureClass, RewardResult
from rollout_server.core.spec import Dialect
from rollout_server.runtime.agent_protocol import Request
from rollout_server.runtime.errors import ToolError
from rollout_server.runtime.ports import Tool
from rollout_server.runtime.run.ending import RolloutEnding
from rollout_server.runtime.run.run import Run
from rollout_server.sdk.core.base import RolloutAgentLoop, RolloutContext, RolloutResult
from rollout_server.sdk.core.exceptions import OsmosisRolloutError, OsmosisValidationError, ToolExecutionError
from rollout_server.sdk.core.schemas import MessageDict, OpenAIFunctionToolSchema, RolloutRequest, RolloutStatus
from rollout_server.sdk.request_view import request_of, validate_tools
from rollout_server.sdk.run_client import RunClient

_log = logging.getLogger(__name__)

_REASON_LENGTH = 256
_MESSAGES_LENGTH = 1024 * 1024


def as_agent(agent_loop: RolloutAgentLoop, *, debug_dir: str | None = None) -> Agent:
    """Return an agent that runs this loop, for `serve` and all other functions that take agents.

    Args:
        agent_loop: an instance, not a class.
        debug_dir: directory in which `log_event` writes one file per rollout; None disables the files.

    Raises TypeError or ValueError for a loop that cannot be served. The message names the class, its file and line.
    """
    if not isinstance(agent_loop, RolloutAgentLoop):
        hint = "; create an instance: create_app(MyAgent())" if isinstance(agent_loop, type) else ""
        raise TypeError(f"an instance of RolloutAgentLoop is needed, not {agent_loop!r}{hint}")
    if not inspect.iscoroutinefunction(agent_loop.run):
        raise TypeError(f"{location_of(agent_loop, 'run')}: run must be `async def`")
    return LoopAgent(agent_loop, debug_dir)


def location_of(agent_loop: RolloutAgentLoop, method: str) -> str:
    """Return `Class.method (file:line)` for error messages."""
    kind = type(agent_loop)
    function = inspect.unwrap(getattr(kind, method, kind))
    try:
        where = f" ({inspect.getsourcefile(function)}:{inspect.getsourcelines(function)[1]})"
    except (OSError, TypeError):
        where = ""
    return f"{kind.__name__}.{method}{where}"


@dataclass(frozen=True, slots=True)
class LoopTool:
    """A tool that is offered to the model and run by the loop itself; `source` is what `get_tools` returned."""

    name: str
    description: str
    parameters_json_schema: str
    strict: bool = False
    source: Any = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, schema: OpenAIFunctionToolSchema, source: object) -> LoopTool:
        """Return the tool of a schema."""
        function = schema.function
        parameters = json.dumps(function.parameters.model_dump(exclude_none=True), ensure_ascii=False)
        return cls(function.name, function.description, parameters, function.strict, source)

    async def run(self, arguments: Mapping[str, JSON]) -> str:
        """Raise `ToolError`: the loop runs its tools itself and never calls this method."""
        raise ToolError(f"The agent loop runs {self.name} itself")


class LoopAgent(Agent):
    """An agent that runs an agent loop of the earlier SDK."""

    replayable = False

    def __init__(self, agent_loop: RolloutAgentLoop, debug_dir: str | None) -> None:
        self.name = agent_loop.name
        self.description = inspect.getdoc(type(agent_loop)) or ""
        self._loop = agent_loop
        self._debug_dir = debug_dir
        # The key is an object that all conversations of a rollout share. Weak keys remove the entry with the rollout.
        self._rewards: weakref.WeakKeyDictionary[RolloutEnding, RewardResult] = weakref.WeakKeyDictionary()
        self.tools = self._tools_without_request()

    def choose_tools(self, request: Request) -> Sequence[Tool]:
        """Return the tools of `get_tools` for the request, or the default tools if the trainer reads only `GET /tools`."""
        return self.offered_tools if _has_fixed_tools(request) else self._tools(request_of(request))

    async def play(self, run: Run) -> None:
        """Run the loop and end the rollout with its result."""
        request = request_of(run.request)
        client = RunClient(run, request)
        tools = list(run.tools)
        if _has_fixed_tools(run.request):
            tools = self._tools(request)
            if tools != list(run.tools):
                run.note("tools_not_told", "get_tools returned other tools for this rollout than the model was offered")
        context = RolloutContext(
            request=request,
            tools=[tool.source for tool in tools if isinstance(tool, LoopTool)],
            llm=client,
            _debug_dir=self._debug_dir,
            _note=run.note,
            _took=client.tool_call_took,
        )
        try:
            result = await self._loop.run(context)
            await self._finish(run, client, result)
        except OsmosisRolloutError as error:
            run.close(_failure(error, run.turn))

    async def reward(self, run: Run) -> RewardResult:
        """Return the reward of the loop's result."""
        return self._rewards.get(run.ending, RewardResult())

    def _tools_without_request(self) -> list[Tool]:
        """Return the tools of `GET /tools`: the loop's default tools, or none if the loop raises without a real request."""
        where = location_of(self._loop, "get_tools")
        try:
            tools = self._loop.get_default_tools()
        except Exception as error:  # boundary to an author's code
            _log.warning("%s: no tools without a real request, so GET /tools lists none", where, exc_info=error)
            return []
        return _loop_tools(tools, where)

    def _tools(self, request: RolloutRequest) -> list[Tool]:
        return _loop_tools(self._loop.get_tools(request), location_of(self._loop, "get_tools"))

    async def _finish(self, run: Run, client: RunClient, result: object) -> None:
        result = self._check_result(result)
        reward = self._reward(result)
        messages = result.final_messages
        known = not messages or await client.conclude(messages)
        if result.status == RolloutStatus.ERROR:
            text = result.error_message or "the agent loop returned an error without an error_message"
            # The outcome of a failed rollout carries final_messages only if the loop returned some.
            extra = _messages_json(run, messages) if messages else ""
            failure = Failure(Category.INTERNAL, text, run.turn, source=FailureClass.ENVIRONMENT)
            run.close(failure, RewardResult(extra_json=extra))
            return
        if not known:
            run.note(
                "final_messages", "final_messages continues no conversation of this rollout; the outcome holds both"
            )
        self._rewards[run.ending] = RewardResult(reward, extra_json="" if known else _messages_json(run, messages))
        await client.finish(result.finish_reason)

    def _check_result(self, result: object) -> RolloutResult:
        where = location_of(self._loop, "run")
        if not isinstance(result, RolloutResult):
            raise TypeError(f"{where} returned {result!r:.100}; return ctx.complete(...) or ctx.error(...)")
        if result.status not in (RolloutStatus.COMPLETED, RolloutStatus.ERROR):
            raise ValueError(f"{where}: status is {result.status!r}; it must be COMPLETED or ERROR")
        reason = result.finish_reason
        if not isinstance(reason, str) or not reason.strip() or len(reason) > _REASON_LENGTH:
            raise ValueError(
                f"{where}: finish_reason is {reason!r:.100}; it must be a string of 1 to {_REASON_LENGTH} characters, not blank"
            )
        return result

    def _reward(self, result: RolloutResult) -> float | None:
        """Return the reward as a float. Booleans are accepted, because many loops return the result of a comparison."""
        if result.reward is None:
            return None
        try:
            reward = float(result.reward)
        except (TypeError, ValueError):
            reward = math.nan
        if not math.isfinite(reward):
            where = location_of(self._loop, "run")
            raise ValueError(f"{where}: reward is {result.reward!r:.100}; it must be a finite number or None")
        return reward


def _loop_tools(tools: Sequence[object], where: str) -> list[Tool]:
    return [LoopTool.of(schema, source) for schema, source in zip(validate_tools(tools, where), tools, strict=True)]


def _has_fixed_tools(request: Request) -> bool:
    """Return whether the trainer takes its tools from `GET /tools`, as with the synchronous HTTP API (docs/design.md, A)."""
    return request.spec.completions.dialect is Dialect.HTTP_MASKED


def _messages_json(run: Run, messages: Sequence[MessageDict]) -> str:
    """Return the loop's final list as JSON for the outcome's extra fields; empty if it is too long."""
    text = json.dumps({"final_messages": messages}, default=str, ensure_ascii=False)
    if len(text) <= _MESSAGES_LENGTH:
        return text
    run.note(
        "final_messages",
        f"final_messages has {len(text):,} characters and is omitted; the limit is {_MESSAGES_LENGTH:,}",
    )
    return ""


def _failure(error: OsmosisRolloutError, turn: int) -> Failure:
    """Return the failure for an SDK error that the loop raised. The caller of the rollout receives its text."""
    category, failure_class = Category.INTERNAL, FailureClass.ENVIRONMENT
    if isinstance(error, ToolExecutionError):
        category, failure_class = Category.TOOL, FailureClass.TOOL
    elif isinstance(error, OsmosisValidationError):
        category = Category.VALIDATION
    return Failure(category, str(error) or type(error).__name__, turn, source=failure_class)
