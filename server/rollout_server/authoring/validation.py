"""Validation of an agent without a GPU: checks of its tools, and a dry run with a mock model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_client import AsyncClient, Tool
from rollout_client.samples import samples

from rollout_server.agent import Agent
from rollout_server.agent.own_loop import OwnLoopAgent
from rollout_server.authoring.endpoint import Endpoint
from rollout_server.authoring.schema import advice, example_arguments, faults
from rollout_server.authoring.single_rollout import RolloutStart, run_rollout
from rollout_server.runtime.run.driver import CLEANUP_FAILED
from rollout_server.runtime.tools.protocols import unwritable
from rollout_server.testing.script import ScriptedReply, tool_call

_NO_COMPLETION = "it requested no completion: is the `await` of a run.sample() missing?"
_NO_LOOP_CALLS = (
    "it did not call its model: does its client take base URL and key from the environment, or from its arguments?"
)
_EARLIER = {
    "run": "the server calls play(self, run)",
    "get_tools": "the tools are its attribute tools",
    "max_turns": "set limits = Limits(turns=...)",
    "rewards": "define async def reward(self, run) or a rubric",
}
"""Names of agents in the style of the earlier SDK and of other libraries, and what has their effect here."""
_PROMPT = "This is a dry run. There is nothing to do."


@dataclass(frozen=True, slots=True)
class ToolReport:
    """The report on a tool: errors, advice, and the result of its call; `called` is None if it did not run."""

    name: str
    parameters: Mapping[str, Any]
    errors: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    called: str | None = None


@dataclass(frozen=True, slots=True)
class AgentReport:
    """The report on an agent. `dry_run` describes how its rollout ended."""

    name: str
    version: str
    replayable: bool
    tools: tuple[ToolReport, ...]
    errors: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    dry_run: Mapping[str, Any] = field(default_factory=dict)

    @property
    def valid(self) -> bool:
        """Whether neither the agent nor a tool has errors."""
        return not self.errors and not any(tool.errors for tool in self.tools)


class DryModel:
    """A mock model that calls each of the given tools once, one per turn, and then finishes."""

    def __init__(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        self._calls = tuple(calls)

    def reply(self, messages: Sequence[Mapping[str, object]]) -> ScriptedReply:
        """Return the next message. The conversation shows how many calls were made, so the object has no state per rollout."""
        done = sum(len(_calls(message)) for message in messages if message.get("role") == "assistant")
        if done >= len(self._calls):
            return ScriptedReply(content="There is nothing to do.")
        name, arguments = self._calls[done]
        return ScriptedReply(tool_calls=(tool_call(f"call_{done + 1}", name, arguments),))


def _calls(message: Mapping[str, object]) -> Sequence[object]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else []


def callable_tools(tools: Sequence[Tool]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the valid tools for which example arguments could be constructed, with the arguments."""
    sound = [tool for tool in tools if not any(faults(tool))]
    made = [(tool.name, example_arguments(json.loads(tool.parameters_json_schema))) for tool in sound]
    return [(name, arguments) for name, arguments in made if arguments is not None]


async def validate(
    client: AsyncClient,
    endpoint: Endpoint,
    agent: Agent,
    calls: Callable[[], Sequence[tuple[str, Mapping[str, Any]]]],
    metadata: Mapping[str, Any],
) -> AgentReport:
    """Check an agent through the API that clients use, and run one rollout with this metadata.

    `calls` returns the tool calls that the mock model at `endpoint` makes.
    """
    tools = await client.tools(agent.name)
    start = RolloutStart(f"dry-run-{agent.name}"[:256], [{"role": "user", "content": _PROMPT}], agent.name, metadata)
    result = await run_rollout(client, endpoint, start)
    errors = [f"the dry run ended with {result.end} ({result.reason}): {result.message}"] if not result.finished else []
    failed_cleanup = [text for text in result.warnings if text.startswith(CLEANUP_FAILED)]
    errors += failed_cleanup
    results = _tool_results(result.messages)
    dry_run = {
        "end": result.end,
        "reason": result.reason,
        "message": result.message,
        "turns": result.turns,
        "reward": result.reward,
        "samples": len(samples((await client.get(result.uid, view="full")).outcome)) if result.uid else 0,
        "warnings": [text for text in result.warnings if text not in failed_cleanup],
    }
    called = [name for name, _ in calls()]
    reports = tuple(_tool(tool, results if tool.name in called else None) for tool in tools)
    advice_found = tuple(_agent_advice(agent, sampled=bool(result.turns) or not result.finished))
    return AgentReport(agent.name, agent.version, agent.replayable, reports, tuple(errors), advice_found, dry_run)


def report_external(agent: Agent) -> AgentReport:
    """Return the report on an agent that runs elsewhere. It has no dry run, because nobody here would call the model."""
    advice_found = ("it runs elsewhere, so there was no dry run", *_agent_advice(agent, sampled=True))
    return AgentReport(agent.name, agent.version, agent.replayable, (), advice=advice_found)


def _tool(tool: Tool, results: Mapping[str, str] | None) -> ToolReport:
    wrong = tuple(faults(tool))
    if wrong:
        return ToolReport(tool.name, {}, wrong)
    called = None if results is None else results.get(tool.name)
    advised = tuple(advice(tool))
    if results is not None and called is None:
        advised += ("the agent did not run the mock model's call",)
    if called is not None and called.startswith(f"Error: {unwritable(tool.name)}"):
        wrong = (f"a call gave the model an error: {called.removeprefix('Error: ')}",)
    return ToolReport(tool.name, json.loads(tool.parameters_json_schema), wrong, advised, called)


def _tool_results(messages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the result of each tool by its name."""
    names = {
        call.get("id"): call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()
    }
    found = {}
    for message in messages:
        if message.get("role") == "tool" and message.get("tool_call_id") in names:
            content = message.get("content")
            found[names[message["tool_call_id"]]] = content if isinstance(content, str) else json.dumps(content)
    return found


def _agent_advice(agent: Agent, *, sampled: bool) -> Sequence[str]:
    from rollout_server.sdk.adapter import LoopAgent

    if isinstance(agent, LoopAgent):
        return ()  # a loop of the earlier SDK uses the request's limits, and returns its reward with its result
    found = [] if sampled else [_NO_LOOP_CALLS if isinstance(agent, OwnLoopAgent) else _NO_COMPLETION]
    found += [
        f"the server does not use its {name}: {instead}"
        for name, instead in _EARLIER.items()
        if hasattr(agent, name) and not hasattr(Agent, name)
    ]
    if agent.limits.turns is None and agent.limits.generated_tokens is None and agent.limits.seconds is None:
        found.append(
            "it has no limits, so only the server's defaults stop a model that calls tools forever; set limits = Limits(turns=...)"
        )
    if type(agent).reward is Agent.reward and agent.rubric is None and not isinstance(agent, OwnLoopAgent):
        found.append(
            "it has no reward, so `rollout eval` has no pass rate; define async def reward(self, run) or a rubric"
        )
    if agent.overrides("reward_group"):
        found.append(
            "rewards over a group are computed only for a group that one call starts (`rollout start --group N`), not by "
            "`rollout run` and `rollout eval`"
        )
    return found
