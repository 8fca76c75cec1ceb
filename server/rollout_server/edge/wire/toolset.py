"""Conversion of the messages of ToolService.

A tool server is not trusted. The size of its answers and their number of fields are checked before they are parsed. The functions
with "proto" in their names are for our own tool server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from google.protobuf.message import DecodeError
from osmosis.rollout.v1 import message_pb2
from osmosis.rollout.v1 import tool_service_pb2 as pb

from rollout_server.core.message import JSON, MalformedMessage, Message, ToolCall, has_more_values, parse_object
from rollout_server.edge.offload import offload_response
from rollout_server.edge.rpc.field_count import TooManyFields, check_fields
from rollout_server.edge.wire.message import blob_to_fields, part_to_proto, tool_to_proto, utf8
from rollout_server.runtime.errors import ArgumentError
from rollout_server.runtime.ports import Content, Tool
from rollout_server.runtime.tools.protocols import is_idempotent
from rollout_server.runtime.tools.toolset import ListedTool, ToolsetCall, ToolsetCaller

LISTING_BYTES: Final = 4 * 1024 * 1024
"""Maximum size of a list of tools."""
RESULT_BYTES: Final = 16 * 1024 * 1024
"""Maximum size of the result of a call. `ToolLimits` bounds its texts and images further."""
_FIELDS: Final = 2**16
_VALUES: Final = 2**16
_MEDIA_TYPE: Final = re.compile(r"[a-z]{1,16}/[A-Za-z0-9_.+-]{1,64}")
_URI: Final = re.compile(r"(?:data|https?):[!-~]+")
_Answer = TypeVar("_Answer", pb.DescribeToolsResponse, pb.CallToolResponse)


@dataclass(frozen=True, slots=True)
class ReportedError:
    """The error that a tool server returns in place of a result. `may_have_run`: the tool broke down after it began."""

    message: str
    may_have_run: bool


def describe_request(caller: ToolsetCaller) -> bytes:
    """Return an encoded DescribeToolsRequest."""
    return pb.DescribeToolsRequest(uid=caller.uid, metadata_json=caller.metadata_json).SerializeToString()


def call_request(call: ToolsetCall, key: str, metadata_json: str) -> bytes:
    """Return an encoded CallToolRequest with this call key. Raises `ArgumentError` for arguments that JSON cannot express."""
    try:
        arguments = json.dumps(call.arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise ArgumentError("a number is infinite or too long") from None
    called = message_pb2.ToolCall(id=utf8(call.call_id), name=utf8(call.name), arguments_json=utf8(arguments))
    return pb.CallToolRequest(uid=call.uid, call_key=key, call=called, metadata_json=metadata_json).SerializeToString()


async def parse_listing(data: bytes) -> Sequence[ListedTool]:
    """Return the tools of an encoded DescribeToolsResponse; a large one is parsed in a thread. Raises `MalformedMessage`."""
    return await offload_response(lambda: _listing(_parse(pb.DescribeToolsResponse, data, LISTING_BYTES)), len(data))


async def parse_result(data: bytes) -> Content | ReportedError:
    """Return the result of an encoded CallToolResponse; a large one is parsed in a thread. Raises `MalformedMessage`."""
    return await offload_response(lambda: _result(_parse(pb.CallToolResponse, data, RESULT_BYTES)), len(data))


def _parse(kind: type[_Answer], data: bytes, most: int) -> _Answer:
    if len(data) > most:
        raise MalformedMessage(f"it has {len(data)} bytes, at most {most} are read")
    try:
        check_fields(data, kind.DESCRIPTOR, _FIELDS)
        return kind.FromString(data)
    except DecodeError:
        raise MalformedMessage(f"it is not a valid {kind.DESCRIPTOR.name}") from None
    except TooManyFields:
        raise MalformedMessage(f"it has more than {_FIELDS} fields, the maximum") from None


def _listing(proto: pb.DescribeToolsResponse) -> Sequence[ListedTool]:
    idempotent = frozenset(proto.idempotent_tools)
    return tuple(
        ListedTool(tool.name, tool.description, tool.parameters_json_schema, tool.name in idempotent)
        for tool in proto.tools
    )


def _result(proto: pb.CallToolResponse) -> Content | ReportedError:
    match proto.WhichOneof("result"):
        case "output":
            return _content(proto.output.parts)
        case "error":
            return ReportedError(proto.error.message, proto.error.may_have_run)
        case _:
            raise MalformedMessage("it has neither `output` nor `error`")


def _content(parts: Sequence[message_pb2.ContentPart]) -> Content:
    if not parts:
        return ""
    if len(parts) == 1 and parts[0].WhichOneof("part") == "text":
        return parts[0].text
    content = []
    for index, part in enumerate(parts):
        try:
            content.append(_part(part))
        except MalformedMessage as error:
            raise MalformedMessage(f"output.parts[{index}]: {error}") from None
    return content


def _part(part: message_pb2.ContentPart) -> Mapping[str, JSON]:
    match part.WhichOneof("part"):
        case "text":
            return {"type": "text", "text": part.text}
        case "blob":
            return _blob(part.blob)
        case "json":
            return _json_part(part.json)
        case _:
            raise MalformedMessage("needs `text`, `blob` or `json`")


def _blob(blob: message_pb2.Blob) -> Mapping[str, JSON]:
    if not _MEDIA_TYPE.fullmatch(blob.media_type):
        raise MalformedMessage("blob.media_type is not a media type such as image/png")
    if blob.WhichOneof("source") == "uri" and not _URI.fullmatch(blob.uri):
        raise MalformedMessage("blob.uri is not a data:, http: or https: URI")
    return blob_to_fields(blob)


def _json_part(text: str) -> Mapping[str, JSON]:
    if has_more_values(text.encode(), _VALUES):
        raise MalformedMessage(f"json has more than {_VALUES} values, the maximum")
    fields = parse_object(text)
    if not isinstance(fields.get("type"), str) or not isinstance(fields.get("text", ""), str):
        raise MalformedMessage("json needs a string under `type`, and `text` must be a string")
    try:  # the tool message must be writable: JSON numbers may be infinite once parsed, and the nesting is limited
        Message.write({"role": "tool", "content": [fields], "tool_call_id": ""})
    except ValueError as error:
        raise MalformedMessage(f"json cannot be part of a message: {error}") from None
    return fields


def tools_to_proto(tools: Sequence[Tool]) -> pb.DescribeToolsResponse:
    """Return the description of tools."""
    idempotent = [tool.name for tool in tools if is_idempotent(tool)]
    return pb.DescribeToolsResponse(tools=[tool_to_proto(tool) for tool in tools], idempotent_tools=idempotent)


def call_from_proto(call: message_pb2.ToolCall) -> ToolCall:
    """Return a tool call. Arguments that are not JSON are the tool's to report."""
    return ToolCall(call.id, call.name, call.arguments_json)


def result_to_proto(content: Content) -> pb.CallToolResponse:
    """Return the response with the result of a call that succeeded."""
    if isinstance(content, str):
        parts = [message_pb2.ContentPart(text=utf8(content))]
    else:
        parts = [_part_to_proto(part, alone=len(content) == 1) for part in content]
    return pb.CallToolResponse(output=pb.ToolOutput(parts=parts))


def _part_to_proto(part: Mapping[str, JSON], *, alone: bool) -> message_pb2.ContentPart:
    """Return a part that the client reads as the same fields. A text that is alone stays JSON: it would become a plain string."""
    text = part.get("text")
    if not alone and isinstance(text, str) and part == {"type": "text", "text": text}:
        return message_pb2.ContentPart(text=utf8(text))
    return part_to_proto(part)


def error_to_proto(text: str, *, may_have_run: bool) -> pb.CallToolResponse:
    """Return the response with the error of a call that failed."""
    error = pb.ToolError(message=utf8(text), may_have_run=may_have_run)
    return pb.CallToolResponse(error=error)
