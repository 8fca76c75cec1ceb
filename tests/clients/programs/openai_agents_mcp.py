"""An agent of the OpenAI Agents SDK whose tools are those of its rollout, over MCP."""

import asyncio
import os

from agents import Agent, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from agents.mcp import MCPServerStreamableHttp
from calculator import MODEL, QUESTION, SYSTEM, THANKS
from openai import AsyncOpenAI

set_tracing_disabled(True)
HEADERS = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}


async def main():
    model = OpenAIChatCompletionsModel(model=MODEL, openai_client=AsyncOpenAI())
    async with MCPServerStreamableHttp({"url": os.environ["BASE"] + "/mcp", "headers": HEADERS}) as tools:
        agent = Agent(name="calculator", instructions=SYSTEM, mcp_servers=[tools], model=model)
        first = await Runner.run(agent, QUESTION)
        second = await Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": THANKS}])
    print(second.final_output)


asyncio.run(main())
