"""A tool of a toolset, and the limits of toolsets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from rollout_server.core.message import JSON
from rollout_server.runtime.errors import ArgumentError
from rollout_server.runtime.ports import Content
from rollout_server.runtime.tools.listing import ListingLimits
from rollout_server.runtime.tools.policy import ToolPolicy
from rollout_server.runtime.tools.protocols import ToolContext, ToolDefinition, ToolFailed, ToolRunner
from rollout_server.runtime.tools.toolset import ListedTool, McpServer, ToolsetSource, is_tool_service


@dataclass(frozen=True, slots=True)
class ToolsetLimits:
    """Limits of toolsets, whatever agents and requests say.

    Args:
        opening: sessions with one toolset that are being opened at the same time; further ones wait.
        open_seconds: time to open a session, and again to list its tools.
        calls: concurrent calls of one toolset, over all rollouts; further ones wait.
        call_seconds: time of a call, for toolsets that requests name.
        retries: further attempts for idempotent tools of such a toolset.
        listing: limits of a toolset's list of tools.
    """

    opening: int = 16
    open_seconds: float = 30.0
    calls: int = 64
    call_seconds: float = 60.0
    retries: int = 2
    listing: ListingLimits = field(default_factory=ListingLimits)


@dataclass(frozen=True, slots=True)
class RemoteTool:
    """A tool that another program runs. Only a server calls it, in a session of the rollout.

    Args:
        listed: the tool as its toolset describes it.
        source: the toolset.
        policy: timeout, retries and the other rules for its calls.
    """

    listed: ListedTool = field(repr=False)
    source: ToolsetSource
    policy: ToolPolicy = field(repr=False)
    threaded: bool = field(default=False, repr=False)

    @property
    def name(self) -> str:
        """Name, unique within the rollout."""
        return self.listed.name

    @property
    def description(self) -> str:
        """Description for the model."""
        return self.listed.description

    @property
    def parameters_json_schema(self) -> str:
        """JSON Schema of the arguments object, as JSON text."""
        return self.listed.parameters_json_schema

    @property
    def definition(self) -> ToolDefinition:
        """The toolset, in the place of a file."""
        return ToolDefinition("", self.name, str(self.source), 0)

    @property
    def runs_keys_once(self) -> bool:
        """Whether its toolset runs a call that is repeated with the same key only once: the rule of a ToolService."""
        return is_tool_service(self.source)

    async def run(self, arguments: Mapping[str, JSON]) -> Content:
        """Raise `ToolFailed`: without a rollout there is no session."""
        return self.run_here(arguments)

    async def run_by(self, runner: ToolRunner, arguments: Mapping[str, JSON]) -> Content:
        """Run one call in the rollout's session. Raises what `ToolsetSession.call` raises.

        Raises `ArgumentError` for arguments that cannot be sent: a connection that fails to send them would be of no use any more.
        """
        try:
            json.dumps(arguments, ensure_ascii=False, allow_nan=False, default=dict).encode()
        except (ValueError, RecursionError):
            raise ArgumentError("they have a value that JSON cannot express") from None
        return await runner.in_toolset(self.source, self.name, arguments)

    def run_here(self, arguments: Mapping[str, JSON], context: ToolContext | None = None) -> NoReturn:
        """Raise `ToolFailed`: a session belongs to a server."""
        raise ToolFailed(f"The tool {self.name} of {self.source} can only be called in a rollout of a server")


def remote_tool(listed: ListedTool, source: ToolsetSource, limits: ToolsetLimits) -> RemoteTool:
    """Return the tool with its policy: the author's, or that of `limits` for a toolset that a request names."""
    if isinstance(source, McpServer):
        return RemoteTool(listed, source, source.policy_of(listed))
    retries = limits.retries if listed.idempotent else 0
    policy = ToolPolicy(timeout=limits.call_seconds, retries=retries, idempotent=listed.idempotent)
    return RemoteTool(listed, source, policy)
