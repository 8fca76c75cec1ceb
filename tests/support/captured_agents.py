"""Agents that own their loop and call the model endpoint of their rollout, without a network in between."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollout_server import Agent, Run
from rollout_server.core.capture.call import Completed, HistoryMessage, ModelApi, ModelCall, OfferedTool
from rollout_server.core.capture.rules import CaptureOptions
from rollout_server.core.spec import Sampling
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.runtime.ports import Tool

Fields = Mapping[str, Any]


def user(text: str) -> Fields:
    """A user message."""
    return {"role": "user", "content": text}


def model_call(*messages: Fields, tools: Sequence[Tool] = (), **fields: Any) -> ModelCall:
    """A call with these messages, in the shape of chat completions."""
    if "sampling" in fields:
        fields["sampling"] = Sampling(**fields["sampling"])
    offered = tuple(OfferedTool(tool.name, tool.description, tool.parameters_json_schema) for tool in tools)
    history = tuple(HistoryMessage(message) for message in messages)
    return ModelCall(history, **{"tools": offered, "api": ModelApi.CHAT, **fields})


def message_of(completed: Completed) -> Fields:
    """The assistant message of a completion."""
    message: Fields = json.loads(completed.message_json)
    return message


class Elsewhere(Agent):
    """An agent that runs elsewhere: `play` waits until it has finished."""

    name = "elsewhere"

    def __init__(self, options: CaptureOptions = CaptureOptions(), idle_seconds: float = 600.0) -> None:
        self.options = options
        self.idle_seconds = idle_seconds

    async def play(self, run: Run) -> None:
        async with run.capture(self.options) as capture:
            work = await capture.finished(self.idle_seconds)
        run.state["work"] = work
        if work.failure is not None:
            raise RolloutFailed(work.failure)

    async def reward(self, run: Run) -> Any:
        return run.state["work"].reward if "work" in run.state else None


class OwnLoop(Agent):
    """The default loop in a client's hands: each call sends the whole history, and the client runs the tools.

    Args:
        edit: what the client makes of an answer.
        questions: user messages that follow, one after each answer without calls.
    """

    def __init__(
        self,
        name: str,
        tools: Sequence[Tool] = (),
        questions: Sequence[str] = (),
        edit: Callable[[Fields], Fields] = dict,
        options: CaptureOptions = CaptureOptions(),
    ) -> None:
        self.name = name
        self.tools = tools
        self._questions = questions
        self._edit = edit
        self._options = options

    async def play(self, run: Run) -> None:
        history, questions = list[Fields](run.request.messages), list(self._questions)
        async with run.capture(self._options) as capture:
            while True:
                completed = await capture.call(model_call(*history, tools=self.tools))
                capture.confirm(completed.id)
                message = self._edit(message_of(completed))
                history.append(message)
                calls = message.get("tool_calls") or []
                for call in calls:
                    history.append(await self._result(call))
                if not calls and not questions:
                    return
                if not calls:
                    history.append(user(questions.pop(0)))

    async def _result(self, call: Fields) -> Fields:
        tool = next(tool for tool in self.tools if tool.name == call["function"]["name"])
        content = await tool.run(json.loads(call["function"]["arguments"]))
        return {"role": "tool", "content": content, "tool_call_id": call["id"]}


class SameLoop(Agent):
    """The same conversation as `OwnLoop`, played by the server."""

    def __init__(self, name: str, tools: Sequence[Tool] = (), questions: Sequence[str] = ()) -> None:
        self.name = name
        self.tools = tools
        self._questions = questions

    async def play(self, run: Run) -> None:
        await super().play(run)
        for question in self._questions:
            await run.append(user(question))
            await super().play(run)
