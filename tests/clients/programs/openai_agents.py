"""An agent of the OpenAI Agents SDK on chat completions (`--chat`) or responses."""

import asyncio
import sys

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from agents.models.openai_responses import OpenAIResponsesModel
from calculator import MODEL, QUESTION, STREAM, SYSTEM, THANKS, TOOLS
from openai import AsyncOpenAI

set_tracing_disabled(True)
kind = OpenAIChatCompletionsModel if "--chat" in sys.argv else OpenAIResponsesModel
tools = [function_tool(tool) for tool in TOOLS.values()]
agent = Agent(name="calculator", instructions=SYSTEM, tools=tools, model=kind(model=MODEL, openai_client=AsyncOpenAI()))


async def run(given):
    if not STREAM:
        return await Runner.run(agent, given)
    result = Runner.run_streamed(agent, given)
    async for _ in result.stream_events():
        pass
    return result


async def main():
    first = await run(QUESTION)
    second = await run([*first.to_input_list(), {"role": "user", "content": THANKS}])
    print(second.final_output)


asyncio.run(main())
