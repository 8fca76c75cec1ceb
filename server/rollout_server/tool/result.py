"""Conversion of a tool's result to the content of a tool message."""

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
"""Approximate maximum size in bytes of a result that is serialised as JSON. Serialisation holds the GIL until it is done."""
_PART = 16  # bytes that each value counts for, besides the length of texts
_DEEPEST = 1000
_FLAT = (int, float, bool, type(None))
_MEDIA_TYPE = re.compile(r"image/[A-Za-z0-9][A-Za-z0-9.+-]*")


class Image:
    """An image as a tool's result, or as one item of a list of texts and images.

    Deliberately not a dataclass: a dataclass is serialised as JSON anywhere in a result, but an image is valid only as a content
    part.

    Args:
        data: the bytes of the image file.
        media_type: MIME type of the file, such as "image/png" or "image/jpeg".

    Raises:
        TypeError: if `data` is not bytes, or is empty.
        ValueError: if `media_type` is not an image type.
    """

    __slots__ = ("_data", "_media_type")

    def __init__(self, data: bytes, media_type: str = "image/png") -> None:
        if not isinstance(data, bytes | bytearray | memoryview) or not data:
            raise TypeError("Image: data must be the bytes of an image file, not empty")
        if not isinstance(media_type, str) or not _MEDIA_TYPE.fullmatch(media_type):
            raise ValueError(f'Image: media_type must be like "image/png", not {media_type!r}')
        self._data = bytes(data)
        self._media_type = media_type

    def __repr__(self) -> str:
        return f"Image({len(self._data)} bytes, media_type={self._media_type!r})"

    @property
    def data(self) -> bytes:
        """The bytes of the image file."""
        return self._data

    @property
    def media_type(self) -> str:
        """The MIME type of the file."""
        return self._media_type

    def part(self) -> dict[str, JSON]:
        """Return the content part of an OpenAI message, with the image as a data URL."""
        url = f"data:{self._media_type};base64,{base64.b64encode(self._data).decode('ascii')}"
        return {"type": "image_url", "image_url": {"url": url}}


def content_of(result: object) -> Content:
    """Return the content of the tool message: a list of parts if the result is or contains an image, else a text.

    Images of PIL are converted to PNG. Raises ValueError, TypeError or RecursionError if the result cannot be serialised.
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
    """Serialise a result: a text verbatim, a number in decimal, everything else as JSON.

    Raises ValueError, TypeError or RecursionError if that is not possible, for example for an infinite number.
    """
    match result:
        case str():
            return str.__str__(result)  # also for a subclass, such as a string enum with its own __str__
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
            return json.dumps(to_jsonable_python(result, fallback=_convert), ensure_ascii=False, allow_nan=False)


def _check_size(value: object) -> None:
    """Raise ValueError for a cyclic value, one that is nested too deeply, or one of more than about `LARGEST` bytes.

    Walks the value with an explicit stack, so depth cannot exhaust Python's, and stops as soon as a bound is exceeded.
    """
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
                raise ValueError(f"Circular reference: a {type(part).__name__} contains itself")
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
            raise ValueError(f"it has more than {LARGEST // 2**20} MiB as JSON; return less, or a text, which is cut")


def _parts(value: object) -> Collection[object]:
    """Return the values inside a value. Raises ValueError for an iterator, which may be infinite."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return value
    if isinstance(value, Iterator):
        raise ValueError(f"a {type(value).__name__} may be infinite; return a list of its items")
    if isinstance(value, type):
        return ()
    if callable(getattr(value, "tolist", None)):
        return _items(value)
    if is_dataclass(value):  # one with slots has no __dict__
        return [getattr(value, field.name, None) for field in fields(value)]
    further = getattr(value, "__pydantic_extra__", None)
    return [*getattr(value, "__dict__", {}).values(), *(further.values() if isinstance(further, dict) else ())]


def _items(array: Any) -> Collection[object]:
    """Return the items of an array of NumPy, torch and others; none for one of their scalars."""
    if (size := getattr(array, "nbytes", 0)) > LARGEST:  # before millions of objects are made of it
        raise ValueError(f"it has an array of {size:,} bytes; return less")
    items = array.tolist()
    return items if isinstance(items, list) else ()


def _convert(value: Any) -> Any:
    """Return an array as a list, and a scalar of NumPy or torch as a number. Raises TypeError for other values."""
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    if _image(value) is not None:
        raise TypeError("an image must be the result itself or an item of a list, not inside another value")
    raise TypeError(f"Unable to serialize unknown type: {type(value)}")


def _image(value: object) -> Image | None:
    if isinstance(value, Image):
        return value
    library = sys.modules.get("PIL.Image")  # if PIL was never imported, the value cannot be one of its images
    if library is None or not isinstance(value, library.Image):
        return None
    buffer = io.BytesIO()
    value.save(buffer, format="PNG")
    return Image(buffer.getvalue())
