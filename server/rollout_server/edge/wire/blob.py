"""Blobs as parts of a message's content, in the shapes of OpenAI-style endpoints.

A data: URI holds media type and bytes; what it does not hold stands in keys of its own beside it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping

from osmosis.rollout.v1 import message_pb2

from rollout_server.core.message import JSON, MalformedMessage


def blob_to_fields(blob: message_pb2.Blob) -> Mapping[str, JSON]:
    """The part that says the same. Raises `MalformedMessage` for a blob without a source."""
    source = blob.WhichOneof("source")
    if source is None:
        raise MalformedMessage("a blob needs `inline` or `uri`")
    kind, _, subtype = blob.media_type.partition("/")
    encoded = base64.b64encode(blob.inline).decode("ascii")
    beside: dict[str, JSON] = {"sha256": blob.sha256.hex()} if blob.sha256 else {}
    if kind == "audio" and source == "inline":
        return {"type": "input_audio", "input_audio": {"data": encoded, "format": subtype}, **beside}
    if source == "uri":
        beside = {"media_type": blob.media_type, **beside}
    uri = blob.uri if source == "uri" else f"data:{blob.media_type};base64,{encoded}"
    if kind == "image":
        return {"type": "image_url", "image_url": {"url": uri}, **beside}
    return {"type": "file", "file": {"file_data": uri}, **beside}


def fields_to_blob(fields: Mapping[str, JSON]) -> message_pb2.Blob | None:
    """The blob of such a part; None for any other."""
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
