"""Loading of tools named on a command line: those of an agent, or those of a module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import rollout_client

from rollout_server.agent import Agent
from rollout_server.agent.checks import checked_tools
from rollout_server.authoring.agent_loader import Reference, agent_names, get_object, load_agent
from rollout_server.authoring.author_traceback import AuthorError
from rollout_server.authoring.schema import faults
from rollout_server.runtime.ports import Tool
from rollout_server.runtime.tools.listing import ListingLimits
from rollout_server.runtime.tools.toolset import McpServer
from rollout_server.tool import FunctionTool

MOST_TOOLS = ListingLimits().tools
"""Maximum number of tools that are served: a server offers no more of one toolset."""


@dataclass(frozen=True, slots=True)
class LoadedTools:
    """Tools to serve.

    Args:
        name, version: of the agent; of a module, its file's name and "1".
        tools: at least one.
        agent: the agent that offers them, which is started before they are called; None for those of a module.
    """

    name: str
    version: str
    tools: Sequence[Tool]
    agent: Agent | None = None


def load_tools(text: str) -> LoadedTools:
    """Return the tools that a reference names: an agent's, one tool, or a list of tools.

    Without a name they are those of the module's agent, or if it has none, all tools that it defines or imports.

    Raises `AuthorError` if there is none, or one that no client could call.
    """
    reference = Reference.parse(text)
    module = reference.load()
    stem = reference.source.rpartition("/")[2].removesuffix(".py")
    if not reference.name:
        agents = agent_names(module)
        if len(agents) > 1:
            one = reference.of(agents[0])
            text = f"contains {len(agents)} agents ({', '.join(agents)}); name one, such as {one}"
            raise AuthorError(text, reference.source)
        if not agents:
            tools = [each for name, each in vars(module).items() if isinstance(each, FunctionTool) and name[0] != "_"]
            return _checked(LoadedTools(stem, "1", _distinct(tools)), reference)
        reference = reference.of(agents[0])
    found = get_object(module, reference)
    if isinstance(found, FunctionTool):
        return _checked(LoadedTools(stem, "1", [found]), reference)
    if isinstance(found, list | tuple):
        try:
            listed = _own(checked_tools(found, str(reference)))
        except (TypeError, ValueError) as error:
            raise AuthorError(str(error), reference.source) from None
        return _checked(LoadedTools(stem, "1", listed), reference)
    agent = load_agent(module, reference)
    return _checked(LoadedTools(agent.name, agent.version, _own(agent.tools), agent), reference)


def _own(tools: Sequence[Tool | McpServer]) -> Sequence[Tool]:
    """Return the tools without toolsets, which clients can reach themselves."""
    return [each for each in tools if not isinstance(each, McpServer)]


def _distinct(tools: Sequence[FunctionTool[..., object]]) -> list[Tool]:
    """Return each tool once: a module may have two names for it."""
    return list({id(each): each for each in tools}.values())


def _checked(loaded: LoadedTools, reference: Reference) -> LoadedTools:
    tools = loaded.tools
    if not tools:
        raise AuthorError("contains no tool: decorate a function with @tool", reference.source)
    if len(tools) > MOST_TOOLS:
        text = f"contains {len(tools)} tools, at most {MOST_TOOLS} can be served; name a list of tools"
        raise AuthorError(text, reference.source)
    names = [each.name for each in tools]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise AuthorError(f"more than one tool has the name {', '.join(map(repr, doubled))}", reference.source)
    for each in tools:
        described = rollout_client.Tool(
            name=each.name, description=each.description, parameters_json_schema=each.parameters_json_schema
        )
        for fault in faults(described):
            raise AuthorError(f"tool {each.name}: {fault}", reference.source)
    return loaded
