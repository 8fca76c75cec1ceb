"""What can be said of an agent before a GPU waits for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_client import AsyncClient, Tool
from rollout_client.samples import samples

from rollout_server.agent import Agent
from rollout_server.authoring.endpoint import Endpoint
from rollout_server.authoring.evaluation import RolloutStart, play
from rollout_server.authoring.schema import advice, example, faults
from rollout_server.testing.script import ScriptedReply, tool_call

_PROMPT = "This is a dry run. There is nothing to do."


@dataclass(frozen=True, slots=True)
class ToolReport:
    """A tool: what is wrong with it, what would be better, and how a call of it went; None: it was not called."""

    name: str
    parameters: Mapping[str, Any]
    errors: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    called: str | None = None


@dataclass(frozen=True, slots=True)
class AgentReport:
    """An agent; `dry_run` says how a rollout of it ended."""

    name: str
    version: str
    replayable: bool
    tools: tuple[ToolReport, ...]
    errors: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    dry_run: Mapping[str, Any] = field(default_factory=dict)

    @property
    def valid(self) -> bool:
        """Nothing is wrong with it or its tools."""
        return not self.errors and not any(tool.errors for tool in self.tools)


class DryModel:
    """Says that it has nothing to do; with `calls` it calls each of these tools once before, one a turn."""

    def __init__(self, calls: Sequence[tuple[str, Mapping[str, Any]]] = ()) -> None:
        self._calls = tuple(calls)

    def reply(self, messages: Sequence[Mapping[str, object]]) -> ScriptedReply:
        """The next message: the conversation says how many calls there were."""
        done = sum(len(_calls(message)) for message in messages if message.get("role") == "assistant")
        if done >= len(self._calls):
            return ScriptedReply(content="There is nothing to do.")
        name, arguments = self._calls[done]
        return ScriptedReply(tool_calls=(tool_call(f"call_{done + 1}", name, arguments),))


def _calls(message: Mapping[str, object]) -> Sequence[object]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else []


def callable_tools(tools: Sequence[Tool]) -> list[tuple[str, Mapping[str, Any]]]:
    """Those tools for which arguments could be made up, with the arguments."""
    sound = [tool for tool in tools if not any(faults(tool))]
    made = [(tool.name, example(json.loads(tool.parameters_json_schema))) for tool in sound]
    return [(name, arguments) for name, arguments in made if arguments is not None]


async def validate(
    client: AsyncClient, endpoint: Endpoint, agent: Agent, calls: Callable[[], Sequence[tuple[str, Mapping[str, Any]]]]
) -> AgentReport:
    """Looks at an agent as clients see it, and plays one rollout. `calls` are those that the model at `endpoint` makes."""
    tools = await client.tools(agent.name)
    ask = RolloutStart(f"dry-run-{agent.name}"[:256], [{"role": "user", "content": _PROMPT}], agent.name)
    result = await play(client, endpoint, ask)
    errors = [f"the dry run ended with {result.end} ({result.reason}): {result.message}"] if not result.finished else []
    answered = _answers(result.messages)
    told = {
        "end": result.end,
        "reason": result.reason,
        "message": result.message,
        "turns": result.turns,
        "reward": result.reward,
        "samples": len(samples((await client.get(result.uid, view="full")).outcome)) if result.uid else 0,
        "warnings": list(result.warnings),
    }
    called = [name for name, _ in calls()]
    reports = tuple(_tool(tool, answered if tool.name in called else None) for tool in tools)
    better = tuple(_better(agent, asked=bool(result.turns) or not result.finished))
    return AgentReport(agent.name, agent.version, agent.replayable, reports, tuple(errors), better, told)


def _tool(tool: Tool, answers: Mapping[str, str] | None) -> ToolReport:
    wrong = tuple(faults(tool))
    if wrong:
        return ToolReport(tool.name, {}, wrong)
    called = None if answers is None else answers.get(tool.name, "the agent did not run the call")
    return ToolReport(tool.name, json.loads(tool.parameters_json_schema), (), tuple(advice(tool)), called)


def _answers(messages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What each tool answered, by its name."""
    names = {
        call.get("id"): call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()
    }
    found = {}
    for message in messages:
        if message.get("role") == "tool" and message.get("tool_call_id") in names:
            content = message.get("content")
            found[names[message["tool_call_id"]]] = content if isinstance(content, str) else json.dumps(content)
    return found


def _better(agent: Agent, *, asked: bool) -> Sequence[str]:
    from rollout_server.sdk.adapter import LoopAgent

    if isinstance(agent, LoopAgent):
        return ()  # a loop of the earlier SDK keeps its request's limits, and has a reward in its result
    found = [] if asked else ["it asked the model for nothing: is a run.sample() not awaited?"]
    if agent.limits.turns is None and agent.limits.generated_tokens is None and agent.limits.seconds is None:
        found.append(
            "it has no limits: a model that goes on calling tools is ended by nobody; limits = Limits(turns=...)"
        )
    if type(agent).reward is Agent.reward:
        found.append("it has no reward: rollout test can tell no pass rate; write async def reward(self, run)")
    return found
