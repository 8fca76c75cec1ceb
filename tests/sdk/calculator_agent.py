"""A calculator in the style of the earlier SDK: only the imports refer to this project."""

from __future__ import annotations

import time
from typing import Any, Dict, List, Optional  # noqa: UP035 - as such code is written

from rollout_server.sdk import (
    OpenAIFunctionParametersSchema,
    OpenAIFunctionPropertySchema,
    OpenAIFunctionSchema,
    OpenAIFunctionToolSchema,
    RolloutAgentLoop,
    RolloutContext,
    RolloutRequest,
    RolloutResult,
)
from rollout_server.sdk.core.exceptions import ToolArgumentError
from rollout_server.sdk.tools import (
    create_tool_error_result,
    create_tool_result,
    execute_tool_calls,
    get_tool_call_info,
    serialize_tool_result,
)


async def add(a: float, b: float) -> float:
    return a + b


async def subtract(a: float, b: float) -> float:
    return a - b


async def multiply(a: float, b: float) -> float:
    return a * b


async def divide(a: float, b: float) -> float:
    if b == 0:
        raise ValueError("Division by zero")
    return a / b


TOOLS = {"add": add, "subtract": subtract, "multiply": multiply, "divide": divide}


def number(description: str) -> OpenAIFunctionPropertySchema:
    return OpenAIFunctionPropertySchema(type="number", description=description)


SCHEMAS: List[OpenAIFunctionToolSchema] = [  # noqa: UP006
    OpenAIFunctionToolSchema(
        type="function",
        function=OpenAIFunctionSchema(
            name=name,
            description=f"{name.capitalize()} two numbers",
            parameters=OpenAIFunctionParametersSchema(
                type="object", properties={"a": number("First"), "b": number("Second")}, required=["a", "b"]
            ),
        ),
    )
    for name in TOOLS
]


async def execute(tool_call: Dict[str, Any]) -> Dict[str, str]:  # noqa: UP006
    try:
        call_id, name, arguments = get_tool_call_info(tool_call)
    except ToolArgumentError as error:
        return create_tool_error_result(error.tool_call_id or tool_call.get("id", "unknown"), str(error))
    if name not in TOOLS:
        return create_tool_error_result(call_id, f"Unknown function '{name}'")
    try:
        return create_tool_result(call_id, serialize_tool_result(await TOOLS[name](**arguments)))
    except (TypeError, ValueError) as error:
        return create_tool_error_result(call_id, str(error))


def reward_of(messages: List[Dict[str, Any]], truth: Optional[str]) -> Optional[float]:  # noqa: UP006, UP045
    if not truth:
        return None
    last = next((m for m in reversed(messages) if m["role"] == "assistant"), {})
    return float(truth in (last.get("content") or ""))


class CalculatorAgentLoop(RolloutAgentLoop):
    """A calculator with four tools."""

    name = "calculator"

    def get_tools(self, request: RolloutRequest) -> List[OpenAIFunctionToolSchema]:  # noqa: UP006
        return SCHEMAS

    async def run(self, ctx: RolloutContext) -> RolloutResult:
        messages = list(ctx.request.messages)
        finish_reason = "stop"
        generated = 0
        for turn in range(ctx.request.max_turns):
            ctx.log_event("pre_llm", turn=turn, num_messages=len(messages))
            result = await ctx.chat(messages, **ctx.request.completion_params)
            messages.append(result.message)
            generated += int((result.usage or {}).get("completion_tokens") or 0)
            if generated >= ctx.request.max_tokens_total:
                finish_reason = "max_tokens"
                break
            if not result.has_tool_calls:
                finish_reason = result.finish_reason or "stop"
                break
            started = time.monotonic()
            results = await execute_tool_calls(result.tool_calls, execute)
            latency = (time.monotonic() - started) * 1000.0
            for _ in result.tool_calls:
                ctx.record_tool_call(latency_ms=latency / len(result.tool_calls))
            messages.extend(results)
            ctx.log_event("tool_results", turn=turn, num_tool_results=len(results))
        else:
            finish_reason = "max_turns"
        reward = reward_of(messages, ctx.request.metadata.get("ground_truth"))
        ctx.log_event("rollout_complete", finish_reason=finish_reason, reward=reward)
        return ctx.complete(messages, finish_reason=finish_reason, reward=reward)


agent_loop = CalculatorAgentLoop()
