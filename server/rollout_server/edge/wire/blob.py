"""Conversion of blobs to and from content parts as OpenAI-style endpoints define them.

A data: URI carries the media type and the bytes. Other fields of a blob (`sha256`, and the `media_type` of a link) become
additional keys of the part.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping

from osmosis.rollout.v1 import message_pb2

from rollout_server.core.message import JSON, MalformedMessage


def blob_to_fields(blob: message_pb2.Blob) -> Mapping[str, JSON]:
    """Return the content part of a blob. Raises `MalformedMessage` for a blob without a source."""
    source = blob.WhichOneof("source")
    if source is None:
        raise MalformedMessage("a blob needs `inline` or `uri`")
    kind, _, subtype = blob.media_type.partition("/")
    encoded = base64.b64encode(blob.inline).decode("ascii")
    extra: dict[str, JSON] = {"sha256": blob.sha256.hex()} if blob.sha256 else {}
    if kind == "audio" and source == "inline":
        return {"type": "input_audio", "input_audio": {"data": encoded, "format": subtype}, **extra}
    if source == "uri":
        extra = {"media_type": blob.media_type, **extra}
    uri = blob.uri if source == "uri" else f"data:{blob.media_type};base64,{encoded}"
    if kind == "image":
        return {"type": "image_url", "image_url": {"url": uri}, **extra}
    return {"type": "file", "file": {"file_data": uri}, **extra}


def fields_to_blob(fields: Mapping[str, JSON]) -> message_pb2.Blob | None:
    """Return the blob of a part that `blob_to_fields` could have written; None for any other part."""
    try:
        digest = bytes.fromhex(_text(fields, "sha256")) if "sha256" in fields else b""
        match fields.get("type"):
            case "input_audio":
                media_type, data = f"audio/{_inner(fields, 'format')}", _inner(fields, "data")
                return message_pb2.Blob(media_type=media_type, inline=_decoded(data), sha256=digest)
            case "image_url":
                return _from_uri(_inner(fields, "url"), fields, digest)
            case "file":
                return _from_uri(_inner(fields, "file_data"), fields, digest)
            case _:
                return None
    except (ValueError, KeyError, TypeError):
        return None


def _from_uri(uri: str, fields: Mapping[str, JSON], digest: bytes) -> message_pb2.Blob:
    if "media_type" in fields:
        return message_pb2.Blob(media_type=_text(fields, "media_type"), uri=uri, sha256=digest)
    head, _, encoded = uri.removeprefix("data:").partition(";base64,")
    return message_pb2.Blob(media_type=head, inline=_decoded(encoded), sha256=digest)


def _decoded(data: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None


def _inner(fields: Mapping[str, JSON], key: str) -> str:
    inner = fields[str(fields["type"])]
    if not isinstance(inner, Mapping):
        raise TypeError(key)
    return _text(inner, key)


def _text(fields: Mapping[str, JSON], key: str) -> str:
    value = fields[key]
    if not isinstance(value, str):
        raise TypeError(key)
    return value
