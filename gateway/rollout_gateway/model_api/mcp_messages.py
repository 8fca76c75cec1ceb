"""Messages of the Model Context Protocol, as far as a server of tools needs them.

Clients of the versions up to 2025-11-25 begin with a handshake. Since 2026-07-28 every request names its version and repeats parts
of the body in its headers, so that proxies can route it; here these requests are called modern.
"""

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from osmosis.rollout.v1 import agent_service_pb2 as pb
from osmosis.rollout.v1.message_pb2 import Blob, ContentPart

from rollout_gateway.json_body import parts_of
from rollout_gateway.model_api.fields import MAX_WORD, InvalidCall, Object, decode

HANDSHAKE_VERSIONS: Final = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
MODERN_VERSIONS: Final = ("2026-07-28",)
VERSION_HEADER: Final = "mcp-protocol-version"

PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS, INTERNAL_ERROR = -32700, -32600, -32601, -32602, -32603
_HEADER_MISMATCH, _UNSUPPORTED_VERSION = -32020, -32022
#: Statuses of errors in responses to modern requests. All others have 200, as all have in responses to older ones.
_STATUSES: Final[Mapping[int, int]] = {
    INVALID_REQUEST: 400,
    INVALID_PARAMS: 400,
    _HEADER_MISMATCH: 400,
    _UNSUPPORTED_VERSION: 400,
    METHOD_NOT_FOUND: 404,
}
_PREFIX: Final = "io.modelcontextprotocol/"
_SERVER: Final = {"name": "rollout-tools", "version": "1"}
_CAPABILITIES: Final[Object] = {"tools": {}}
# The tools of a rollout do not change.
_CACHED: Final = {"ttlMs": 300_000, "cacheScope": "private"}
# How a header has a text that is not plain ASCII.
_ENCODED: Final = re.compile(r"=\?base64\?(.*)\?=")


class McpError(Exception):
    """An error in the response to a message. `code` is that of JSON-RPC."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.code, self.message, self.data = code, message, data


@dataclass(frozen=True, slots=True)
class McpMessage:
    """A message of a client.

    Args:
        id: the id of the request; None: the message is a notification.
        arguments: raw JSON of the arguments of a call; empty: none.
        modern: the request has no handshake before it.
    """

    id: str | int | None
    method: str
    params: Object
    arguments: str
    modern: bool

    def response(self, result: Object) -> Object:
        """Return a response with a result."""
        kind = {"resultType": "complete"} if self.modern else {}
        return {"jsonrpc": "2.0", "id": self.id, "result": {**kind, **result}}

    def cached(self, result: Object) -> Object:
        """Return a response with a result that the client may keep for a while."""
        return self.response({**(_CACHED if self.modern else {}), **result})

    def error_status(self, error: McpError) -> int:
        """Return the HTTP status of an error response. Some older clients wait for ever after any other than 200."""
        return _STATUSES.get(error.code, 200) if self.modern else 200


def error_response(error: McpError, message_id: str | int | None = None) -> Object:
    """Return a response with an error."""
    shown = {"code": error.code, "message": error.message}
    return {"jsonrpc": "2.0", "id": message_id, "error": shown if error.data is None else {**shown, "data": error.data}}


def read_message(content: bytes, *, modern: bool) -> McpMessage:
    """Parse a body. Raises McpError for one that is no request or notification, such as a batch."""
    try:
        body = decode(content)
    except InvalidCall as error:
        raise McpError(PARSE_ERROR, str(error)) from None
    method, params, message_id = body.get("method"), body.get("params"), body.get("id")
    valid_id = isinstance(message_id, str | int) and not isinstance(message_id, bool)
    if body.get("jsonrpc") != "2.0" or not isinstance(method, str) or not (valid_id or "id" not in body):
        raise McpError(INVALID_REQUEST, "the body must be one JSON-RPC 2.0 request or notification")
    if not isinstance(params, dict | None):
        raise McpError(INVALID_REQUEST, "params must be an object")
    raw = parts_of(parts_of(msgspec.Raw(content)).get("params")).get("arguments", msgspec.Raw(b""))
    arguments = bytes(raw).decode()
    return McpMessage(message_id, method, params or {}, "" if arguments == "null" else arguments, modern)


def check_modern(message: McpMessage, headers: Mapping[str, Sequence[str]]) -> None:
    """Check what a modern request says of itself. `headers` are all values by name, in lower case. Raises McpError."""
    meta = message.params.get("_meta")
    version_key, wanted = f"{_PREFIX}protocolVersion", f"{_PREFIX}clientCapabilities"
    if not isinstance(meta, dict) or not meta.keys() >= {version_key, wanted}:
        raise McpError(INVALID_PARAMS, f"params._meta must have {version_key} and {wanted}")
    expected = {VERSION_HEADER: meta[version_key], "mcp-method": message.method}
    if message.method == "tools/call" and "name" in message.params:
        expected["mcp-name"] = message.params["name"]
    for name, value in expected.items():
        if [_plain(each) for each in headers.get(name, ())] != [value]:
            raise McpError(_HEADER_MISMATCH, f"the header {name} must be sent once, and equal what the body has")
    if meta[version_key] not in MODERN_VERSIONS:
        data = {"supported": [*MODERN_VERSIONS], "requested": meta[version_key]}
        raise McpError(_UNSUPPORTED_VERSION, "this version of the protocol is not supported", data)


def _plain(header: str) -> str | None:
    """Return the text of a header; None if it is encoded wrongly."""
    found = _ENCODED.fullmatch(header)
    if found is None:
        return header
    try:
        return base64.b64decode(found[1], validate=True).decode()
    except ValueError:
        return None


def initialized(message: McpMessage) -> Object:
    """Return the response to the handshake: in the client's version if it is known, otherwise in the newest one."""
    asked = message.params.get("protocolVersion")
    version = asked if asked in HANDSHAKE_VERSIONS else HANDSHAKE_VERSIONS[-1]
    return message.response({"protocolVersion": version, "capabilities": _CAPABILITIES, "serverInfo": _SERVER})


def discovered(message: McpMessage) -> Object:
    """Return the response to `server/discover`."""
    found = {"supportedVersions": [*MODERN_VERSIONS], "capabilities": _CAPABILITIES}
    return message.cached({**found, "_meta": {f"{_PREFIX}serverInfo": _SERVER}})


def listed(message: McpMessage, found: pb.ListRolloutToolsResponse) -> Object:
    """Return the response to `tools/list`, all on one page."""
    tools = []
    for tool in found.tools:
        schema = msgspec.Raw(tool.parameters_json_schema.encode() or b'{"type":"object"}')
        shown = {"name": tool.name, "description": tool.description, "inputSchema": schema}
        hints = {"annotations": {"idempotentHint": True}} if tool.name in found.idempotent_tools else {}
        tools.append(shown | hints)
    return message.cached({"tools": tools})


def tool_request(message: McpMessage, uid: str, repeat_key: str) -> pb.CallRolloutToolRequest:
    """Return the call of a tool. Raises McpError."""
    name = message.params.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_WORD:
        raise McpError(INVALID_PARAMS, f"params.name must be a text of 1 to {MAX_WORD} characters")
    return pb.CallRolloutToolRequest(uid=uid, name=name, arguments_json=message.arguments, repeat_key=repeat_key)


def called(message: McpMessage, result: pb.CallRolloutToolResponse) -> Object:
    """Return the response to `tools/call`. An error of the tool is a result, which the model reads."""
    return message.response({"content": [_content(part) for part in result.parts], "isError": result.failed})


def _content(part: ContentPart) -> Object:
    if part.HasField("blob"):
        return _blob(part.blob)
    return {"type": "text", "text": part.text or part.json}


def _blob(blob: Blob) -> Object:
    """Return an image or audio as such, what has an address as a link, and a file as a resource."""
    kind, media = blob.media_type.partition("/")[0], {"mimeType": blob.media_type}
    if blob.HasField("uri") and not blob.uri.startswith("data:"):
        return {"type": "resource_link", "uri": blob.uri, "name": blob.uri[:MAX_WORD], **media}
    encoded = blob.uri.partition(";base64,")[2]
    data = encoded if blob.HasField("uri") else base64.b64encode(blob.inline).decode()
    if kind in ("image", "audio"):
        return {"type": kind, "data": data, **media}
    return {"type": "resource", "resource": {"uri": "data:", "blob": data, **media}}
