"""An MCP server over tools of this process, for all its transports."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError
from mcp.types import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    CallToolRequestParams,
    CallToolResult,
    ContentBlock,
    ImageContent,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
    ToolAnnotations,
)

from rollout_server.core.error import Busy, InvalidRequest, RolloutError
from rollout_server.core.message import JSON, ToolCall
from rollout_server.runtime import ports
from rollout_server.runtime.tools.protocols import is_idempotent
from rollout_server.runtime.tools.toolset import CALL_META_KEY, UID_META_KEY
from rollout_server.tool_server.calls import ServedCall, ServedTools
from rollout_server.tool_server.keyed_calls import ServedResult

_SESSION_HEADER = "mcp-session-id"


class McpService:
    """The handlers of an MCP server.

    A call belongs to the rollout that its `_meta` names, and runs at most once per call key, if it has one. Without a rollout it
    belongs to the session: that of the handshake over HTTP, or `session`, the only one of a server on standard input. A call
    without both has a state of its own.
    """

    def __init__(self, served: ServedTools, name: str, version: str, session: str = "") -> None:
        self._served = served
        self._session = session
        self._tools = [_description(tool) for tool in served.tools]
        schemas = {tool.name: tool.input_schema for tool in self._tools}
        self.server: Server[Any] = Server(
            name,
            version=version,
            on_list_tools=self._list,
            on_call_tool=self._call,
            get_tool_input_schema=schemas.get,
        )

    async def _list(self, context: ServerRequestContext[Any], params: PaginatedRequestParams | None) -> ListToolsResult:
        return ListToolsResult(tools=self._tools)

    async def _call(self, context: ServerRequestContext[Any], params: CallToolRequestParams) -> CallToolResult:
        uid, key = _meta_text(context, UID_META_KEY), _meta_text(context, CALL_META_KEY)
        headers: Mapping[str, str] = getattr(context.request, "headers", {})
        session = self._session or headers.get(_SESSION_HEADER, "")
        call = ToolCall("", params.name, params.arguments or {})
        try:
            result = await self._served.call(ServedCall(call, uid=uid, session=session, key=key))
        except RolloutError as error:
            code = INVALID_PARAMS if isinstance(error, InvalidRequest) else INTERNAL_ERROR
            again = {"retryAfterSeconds": error.retry_after} if isinstance(error, Busy) else {}
            raise MCPError(code, error.message, {"reason": error.reason, **again}) from None
        return _result(result)


def _meta_text(context: ServerRequestContext[Any], key: str) -> str:
    value: object = (context.meta or {}).get(key, "")
    if not isinstance(value, str):
        raise MCPError(INVALID_PARAMS, f"_meta: {key} must be a string")
    return value


def _description(tool: ports.Tool) -> Tool:
    return Tool(
        name=tool.name,
        description=tool.description,
        input_schema=json.loads(tool.parameters_json_schema),
        annotations=ToolAnnotations(idempotent_hint=True) if is_idempotent(tool) else None,
    )


def _result(result: ServedResult) -> CallToolResult:
    content = result.content
    parts: Sequence[Mapping[str, JSON]] = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return CallToolResult(content=[*_blocks(parts)], is_error=result.failed)


def _blocks(parts: Sequence[Mapping[str, JSON]]) -> Iterator[ContentBlock]:
    """Yield texts and images as MCP has them, and any other part as its JSON text."""
    for part in parts:
        text, image = part.get("text"), part.get("image_url")
        url = image.get("url") if isinstance(image, Mapping) else None
        if part.get("type") == "text" and isinstance(text, str):
            yield TextContent(type="text", text=_utf8(text))
        elif isinstance(url, str) and url.startswith("data:") and ";base64," in url:
            media_type, _, data = url.removeprefix("data:").partition(";base64,")
            yield ImageContent(type="image", data=data, mime_type=media_type)
        else:
            yield TextContent(type="text", text=_utf8(json.dumps(part, ensure_ascii=False)))


def _utf8(text: str) -> str:
    """Return the text with lone surrogates, which UTF-8 cannot encode, as question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")
