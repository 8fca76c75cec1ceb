"""Faulty and unusual agent loops of the earlier SDK."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rollout_server.sdk import (
    OpenAIFunctionToolSchema,
    RolloutAgentLoop,
    RolloutContext,
    RolloutRequest,
    RolloutResult,
)

Play = Callable[[RolloutContext], Awaitable[Any]]


class Loop(RolloutAgentLoop):
    """Run a function, and store the exceptions it catches."""

    name = "loop"

    def __init__(self, play: Play, tools: Sequence[OpenAIFunctionToolSchema] = ()) -> None:
        self.tools = list(tools)
        self.caught: list[BaseException] = []
        self._play = play

    def get_tools(self, request: RolloutRequest) -> list[OpenAIFunctionToolSchema]:
        return self.tools

    async def run(self, ctx: RolloutContext) -> RolloutResult:
        try:
            result: RolloutResult = await self._play(ctx)
        except BaseException as error:
            self.caught.append(error)
            raise
        return result


async def say(ctx: RolloutContext, *messages: dict[str, Any]) -> tuple[list[dict[str, Any]], Any]:
    """Run one turn; return the list with the completion appended, and the completion."""
    given = list(messages) or list(ctx.request.messages)
    result = await ctx.chat(given, **ctx.request.completion_params)
    return [*given, result.message], result


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}
