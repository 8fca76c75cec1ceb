"""What a model reads of a tool's result."""

from __future__ import annotations

import base64
import io
import json
import math
import re
import sys
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from pydantic_core import to_jsonable_python

from rollout_server.core.message import JSON
from rollout_server.runtime.ports import Content

LARGEST = 4 * 1024 * 1024
"""Of a result that is written as JSON, about so many bytes. It is written at one go, and nothing else runs meanwhile."""
_PART = 16
_DEEPEST = 1000
_FLAT = (int, float, bool, type(None))
_MEDIA_TYPE = re.compile(r"image/[A-Za-z0-9][A-Za-z0-9.+-]*")


class Image:
    """An image as a tool's result, or as one item of a list of texts and images. Raises TypeError or ValueError.

    No dataclass: those are written as JSON wherever they stand, and an image only has its place in content parts.

    Args:
        data: the file's bytes.
        media_type: what they are, such as "image/png" or "image/jpeg".
    """

    __slots__ = ("_data", "_media_type")

    def __init__(self, data: bytes, media_type: str = "image/png") -> None:
        if not isinstance(data, bytes | bytearray | memoryview) or not data:
            raise TypeError("an Image's data is the bytes of a file, at least one")
        if not isinstance(media_type, str) or not _MEDIA_TYPE.fullmatch(media_type):
            raise ValueError(f'an Image\'s media_type is of the kind "image/png", not {media_type!r}')
        self._data = bytes(data)
        self._media_type = media_type

    def __repr__(self) -> str:
        return f"Image({len(self._data)} bytes, media_type={self._media_type!r})"

    @property
    def data(self) -> bytes:
        """The file's bytes."""
        return self._data

    @property
    def media_type(self) -> str:
        """What they are."""
        return self._media_type

    def part(self) -> dict[str, JSON]:
        """As OpenAI writes images in messages."""
        url = f"data:{self._media_type};base64,{base64.b64encode(self._data).decode('ascii')}"
        return {"type": "image_url", "image_url": {"url": url}}


def content_of(result: object) -> Content:
    """The content of the tool message: parts where the result is an image or a list with one, elsewhere a text.

    Images of PIL are written as PNG. Raises ValueError, TypeError or RecursionError for what cannot be written.
    """
    image = _image(result)
    if image is not None:
        return [image.part()]
    if not isinstance(result, list | tuple):
        return result_text(result)
    images = [_image(item) for item in result]
    if not any(images):
        return result_text(result)
    return [
        found.part() if found is not None else {"type": "text", "text": result_text(item)}
        for item, found in zip(result, images, strict=True)
    ]


def result_text(result: object) -> str:
    """A text as it is, a number plainly, everything else as JSON.

    Raises ValueError, TypeError or RecursionError for what cannot be written, an infinite number among them.
    """
    match result:
        case str():
            return str.__str__(result)
        case bool() | None:
            return json.dumps(result)
        case int():
            return int.__repr__(result)
        case float():
            if not math.isfinite(result):
                raise ValueError(f"{result} is not a finite number")
            return float.__repr__(result)
        case _:
            _check_size(result)
            return json.dumps(to_jsonable_python(result, fallback=_refuse), ensure_ascii=False, allow_nan=False)


def _check_size(value: object) -> None:
    """Raises ValueError for what holds itself, or takes more than `LARGEST` bytes, `_PART` for each part. Counts no further."""
    total = 0
    within: list[tuple[int, Iterator[object]]] = [(0, iter((value,)))]
    open_ids: set[int] = set()
    while within:
        own, left = within[-1]
        for part in left:
            if isinstance(part, str | bytes | bytearray):
                total += len(part)
                continue
            if id(part) in open_ids:
                raise ValueError(f"Circular reference: a {type(part).__name__} holds itself")
            parts = _parts(part)
            total += _PART * len(parts)
            open_ids.add(id(part))
            if len(within) > _DEEPEST:
                raise ValueError(f"it is nested more than {_DEEPEST} levels deep")
            within.append((id(part), iter([each for each in parts if type(each) not in _FLAT])))
            break
        else:
            within.pop()
            open_ids.discard(own)
        if total > LARGEST:
            raise ValueError(f"it has more than {LARGEST // 2**20} MiB as JSON; a text may be longer, and is cut")


def _parts(value: object) -> Collection[object]:
    """Whatever is written of a value. Raises ValueError for one that is read as it is written: it may have no end."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return value
    if isinstance(value, Iterator):
        raise ValueError(f"a {type(value).__name__} may have no end; return a list of what it gives")
    if isinstance(value, type):
        return ()
    if is_dataclass(value):  # one with slots has no __dict__
        return [getattr(value, field.name, None) for field in fields(value)]
    further = getattr(value, "__pydantic_extra__", None)
    return [*getattr(value, "__dict__", {}).values(), *(further.values() if isinstance(further, dict) else ())]


def _refuse(value: Any) -> Any:
    if _image(value) is not None:
        raise TypeError("an image is a result itself, or one item of a list; it is not written into other values")
    raise TypeError(f"Unable to serialize unknown type: {type(value)}")


def _image(value: object) -> Image | None:
    if isinstance(value, Image):
        return value
    library = sys.modules.get("PIL.Image")  # where nobody has imported it, nothing is of it
    if library is None or not isinstance(value, library.Image):
        return None
    buffer = io.BytesIO()
    value.save(buffer, format="PNG")
    return Image(buffer.getvalue())
