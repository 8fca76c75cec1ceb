"""A tool-calling agent of smolagents."""

import os

from calculator import MODEL, QUESTION, STREAM
from calculator import add as plus
from calculator import multiply as times
from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def multiply(a: int, b: int) -> str:
    """Multiply two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return times(a, b)


@tool
def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return plus(a, b)


model = OpenAIServerModel(MODEL, api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = ToolCallingAgent(tools=[multiply, add], model=model, stream_outputs=STREAM, verbosity_level=0, max_steps=4)
print(agent.run(QUESTION))
