"""Toolsets: tools that another program runs, such as an MCP server or a ToolService.

A session is a connection to a toolset, for one rollout or for the whole server. `edge.toolsets` opens sessions; `toolsets` decides
whose they are, when they are opened and closed, and what their errors mean for a rollout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Final, Literal, Protocol, TypeAlias

from rollout_server.core.message import JSON
from rollout_server.core.spec import Dialect, Target
from rollout_server.runtime.ports import Content
from rollout_server.runtime.tools.policy import ToolPolicy

UID_META_KEY: Final = "osmosis.rollout/uid"
CALL_META_KEY: Final = "osmosis.rollout/call-key"
"""Keys of the caller's uid and of `ToolsetCall.key` in the `_meta` of an MCP call."""


@dataclass(frozen=True, slots=True)
class McpServer:
    """An MCP server whose tools an agent offers. Made by `mcp`, which documents the fields.

    `policy` is for all its tools, without `retries`, which apply only to those that are idempotent.
    """

    address: str | tuple[str, ...]
    include: tuple[str, ...] | None = None
    session: Literal["rollout", "shared"] = "rollout"
    policy: ToolPolicy = field(default_factory=ToolPolicy)
    bearer_variable: str = ""
    environment: tuple[str, ...] = ()
    directory: str = ""
    retries: int = 0
    idempotent: tuple[str, ...] | bool | None = None

    def __str__(self) -> str:
        """Return the URL without its query, or the program with its first argument and the short options before that.

        It is in metrics, and in errors that models read, so it must not have a key. Long options may.
        """
        if isinstance(self.address, str):
            return self.address.partition("?")[0]
        program, *arguments = self.address
        words = [PurePath(program).name]
        for argument in arguments:
            if argument.startswith("--"):
                break
            words.append(argument)
            if not argument.startswith("-"):
                break
        return " ".join(words)

    def policy_of(self, tool: ListedTool) -> ToolPolicy:
        """Return how calls of one of its tools are executed: with retries only if the tool is idempotent."""
        match self.idempotent:
            case None:
                idempotent = tool.idempotent
            case bool(all_or_none):
                idempotent = all_or_none
            case names:
                idempotent = tool.name in names
        return replace(self.policy, idempotent=idempotent, retries=self.retries if idempotent else 0)


@dataclass(frozen=True, slots=True)
class RequestedToolset:
    """The toolset that a request names: `spec.tools`. Its dialect is GRPC for a ToolService, MCP for an MCP server."""

    target: Target

    def __str__(self) -> str:
        return self.target.url


ToolsetSource: TypeAlias = McpServer | RequestedToolset
"""Where the tools of a toolset are. `str(source)` names it in messages and metrics."""


def is_tool_service(source: ToolsetSource) -> bool:
    """Return whether it is a ToolService."""
    return isinstance(source, RequestedToolset) and source.target.dialect is Dialect.GRPC


@dataclass(frozen=True, slots=True)
class ToolsetCaller:
    """For whom a session is opened.

    Args:
        uid: the server's id of the rollout; empty: the whole server.
        metadata_json: the rollout's metadata, one JSON object; may be empty.
        bearer: the bearer token for the toolset, from the request's credentials; empty: none.
    """

    uid: str = ""
    metadata_json: str = ""
    bearer: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class ListedTool:
    """A tool as its toolset describes it. `idempotent`: the toolset says that a repeated call is harmless."""

    name: str
    description: str
    parameters_json_schema: str
    idempotent: bool = False


@dataclass(frozen=True, slots=True)
class ToolsetCall:
    """One call of a tool.

    Args:
        name: name of the tool.
        arguments: the arguments object.
        key: equal for all attempts at this call, different for all other calls of all rollouts.
        uid: the server's id of the rollout that calls; of a session for the whole server, it differs from call to call.
        call_id: the id that the model gave to the call; may be empty, and is not unique.
        idempotent: whether the call is harmless to repeat, also with another key.
    """

    name: str
    arguments: Mapping[str, JSON]
    key: str
    uid: str
    call_id: str = ""
    idempotent: bool = False


class ToolsetSession(Protocol):
    """An open connection to a toolset. All its methods may be called concurrently, and cancelled."""

    async def list_tools(self) -> Sequence[ListedTool]:
        """Return the tools in the toolset's order. They are not checked, but the number of bytes that is read for them is limited.

        Raises `ToolFailed` with a text that says what is wrong with the answer.
        """

    async def call(self, call: ToolsetCall) -> Content:
        """Run one call and return its result.

        A request that certainly did not run is sent again here, with the same key, a few times or for some seconds.

        Raises:
            ToolError: the tool reports an error. Its text is for the model.
            ToolFailed: no result, or one that is not valid; the call may have run. The session can be used further.
            ToolsetLost: like `ToolFailed`, and the session is over.
        """


class ToolsetConnector(Protocol):
    """Opens sessions with toolsets, over whatever they speak."""

    def connect(self, source: ToolsetSource, caller: ToolsetCaller) -> AbstractAsyncContextManager[ToolsetSession]:
        """Open a session, and close it with everything that belongs to it, such as the processes that were started.

        It is entered and left in one task. Entering raises `ToolFailed` with a text that names the toolset and says what to do.
        """
