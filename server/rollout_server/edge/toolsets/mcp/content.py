"""Conversion of an MCP server's results to the content of tool messages."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from typing import Final

from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from rollout_server.core.message import JSON
from rollout_server.runtime.errors import ToolError
from rollout_server.runtime.ports import Content
from rollout_server.runtime.tools.protocols import ToolFailed

_IMAGE_TYPE: Final = re.compile(r"image/[A-Za-z0-9][A-Za-z0-9.+-]*")


def content_of_result(result: CallToolResult) -> Content:
    """Return the content of the tool message: a text, or parts if the result has images.

    Raises `ToolError` if the result is an error, and `ToolFailed` for an image that is not one.
    """
    parts = [_part(block) for block in result.content]
    if not parts and result.structured_content is not None:
        parts = [_text(json.dumps(result.structured_content, ensure_ascii=False))]
    texts = [text for part in parts if isinstance(text := part.get("text"), str)]
    if result.is_error:
        raise ToolError("\n".join(texts) or "the tool reported an error without a text")
    return "\n".join(texts) if len(texts) == len(parts) else parts


def _part(block: ContentBlock) -> Mapping[str, JSON]:
    match block:
        case TextContent(text=text):
            return _text(text)
        case ImageContent(data=data, mime_type=kind):
            return _image(data, kind)
        case AudioContent(data=data, mime_type=kind):
            return _text(f"[audio, {kind}, {_size(data):,} bytes]")
        case ResourceLink():
            about = f": {block.description}" if block.description else ""
            return _text(f"[resource {block.name}, {block.uri}{about}]")
        case EmbeddedResource(resource=resource):
            return _resource(resource)


def _resource(resource: TextResourceContents | BlobResourceContents) -> Mapping[str, JSON]:
    if isinstance(resource, TextResourceContents):
        return _text(resource.text)
    kind = resource.mime_type or "of an unknown type"
    if kind.startswith("image/"):
        return _image(resource.blob, kind)
    return _text(f"[resource {resource.uri}, {kind}, {_size(resource.blob):,} bytes]")


def _text(text: str) -> Mapping[str, JSON]:
    return {"type": "text", "text": text}


def _image(data: str, kind: str) -> Mapping[str, JSON]:
    if not _IMAGE_TYPE.fullmatch(kind):
        raise ToolFailed("its result has an image whose MIME type is not that of an image")
    try:
        is_empty = not base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise ToolFailed("its result has an image that is not base64") from None
    if is_empty:
        raise ToolFailed("its result has an empty image")
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}


def _size(data: str) -> int:
    return len(data) * 3 // 4
