"""A ReAct agent of LangGraph with a model of OpenAI, or of Anthropic (`--anthropic`), or on responses (`--responses`)."""

import os
import sys

from calculator import MODEL, QUESTION, STREAM, SYSTEM, THANKS, TOOLS
from langchain_core.tools import tool
from langgraph.prebuilt import create_react_agent

if "--anthropic" in sys.argv:
    from langchain_anthropic import ChatAnthropic

    model = ChatAnthropic(model=MODEL, base_url=os.environ["ANTHROPIC_BASE_URL"], streaming=STREAM)
else:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, streaming=STREAM, use_responses_api="--responses" in sys.argv)

agent = create_react_agent(model, [tool(each) for each in TOOLS.values()], prompt=SYSTEM)
state = agent.invoke({"messages": [("user", QUESTION)]})
state = agent.invoke({"messages": [*state["messages"], ("user", THANKS)]})
print(state["messages"][-1].text)
