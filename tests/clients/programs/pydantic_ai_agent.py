"""A pydantic-ai agent over chat completions (`--chat`), responses (`--responses`) or messages."""

import asyncio
import sys

from calculator import MODEL, QUESTION, STREAM, SYSTEM, THANKS, TOOLS
from pydantic_ai import Agent

if "--chat" in sys.argv:
    from pydantic_ai.models.openai import OpenAIChatModel as Model
elif "--responses" in sys.argv:
    from pydantic_ai.models.openai import OpenAIResponsesModel as Model
else:
    from pydantic_ai.models.anthropic import AnthropicModel as Model

agent = Agent(Model(MODEL), instructions=SYSTEM, tools=list(TOOLS.values()))


async def drained(_, events):
    async for _ in events:
        pass


async def main():
    handler = drained if STREAM else None
    first = await agent.run(QUESTION, event_stream_handler=handler)
    second = await agent.run(THANKS, message_history=first.all_messages(), event_stream_handler=handler)
    print(second.output)


asyncio.run(main())
