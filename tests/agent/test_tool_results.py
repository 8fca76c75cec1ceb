"""Tool results as the model receives them."""

from __future__ import annotations

import math
import threading
from collections import deque
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from itertools import count

import numpy as np
import pytest
from rollout_server import ToolError, tool
from rollout_server.tool import Image

from tests.agent.shapes import Colour, Level, Point, Size


@pytest.mark.parametrize(
    ("result", "content"),
    [
        ("8", "8"),
        ("", ""),
        ('{"as": "it is"}\n', '{"as": "it is"}\n'),
        (8, "8"),
        (-7, "-7"),
        (10**24, "1000000000000000000000000"),
        (2.5, "2.5"),
        (2.0, "2.0"),
        (0.1 + 0.2, "0.30000000000000004"),
        (1e300, "1e+300"),
        (True, "true"),
        (None, "null"),
        ([1, 2.5, "ä", None], '[1, 2.5, "ä", null]'),
        ({"a": {"b": True}}, '{"a": {"b": true}}'),
        ((1, 2), "[1, 2]"),
        (Point(title="t", x=1), '{"title": "t", "x": 1, "at": null}'),
        (Size(3), '{"width": 3}'),
        ([Size(3), Point(title="t", x=1.5)], '[{"width": 3}, {"title": "t", "x": 1.5, "at": null}]'),
        (Colour.RED, '"red"'),
        (Level.LOW, "1"),
        (date(2024, 5, 6), '"2024-05-06"'),
        (Decimal("1.10"), '"1.10"'),
        (np.int64(3), "3"),
        (np.float32(1.5), "1.5"),
        (np.bool_(True), "true"),
        ({"mean": np.float32(0.5), "grid": np.arange(4).reshape(2, 2)}, '{"mean": 0.5, "grid": [[0, 1], [2, 3]]}'),
    ],
)
async def test_how_results_are_written(result: object, content: str) -> None:
    @tool
    async def give() -> object:
        return result

    assert await give.run({}) == content


@dataclass(slots=True)
class Slotted:
    """A class without `__dict__`."""

    values: object


def nested(levels: int) -> list[object]:
    """A list nested this deep."""
    value: list[object] = []
    for _ in range(levels):
        value = [value]
    return value


CIRCLE: list[object] = []


CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    ("result", "why"),
    [
        pytest.param(10**5000, "too many digits", id="digits"),
        (math.inf, "inf is not a finite number"),
        (math.nan, "nan is not a finite number"),
        ([math.inf], "not JSON compliant"),
        (np.array([1.0, math.nan]), "not JSON compliant"),
        pytest.param(np.zeros(2**20), "it has an array of 8,388,608 bytes", id="array"),
        (object(), "Unable to serialize unknown type"),
        ({"a": threading.Lock()}, "Unable to serialize unknown type"),
        (CIRCLE, "Circular reference: a list contains itself"),
        pytest.param((each for each in "abc"), "a generator may be infinite", id="generator"),
        (map(str, count()), "a map may be infinite"),
        pytest.param(Slotted(deque(["x" * 1_000_000] * 5)), "more than 4 MiB as JSON", id="slots and a deque"),
        pytest.param(nested(2000), "nested more than 1000 levels deep", id="nested"),
        ({"a": Image(b"x")}, "an image must be the result itself or an item of a list"),
        ([[Image(b"x")]], "an image must be the result itself or an item of a list"),
        ([Image(b"x"), object()], "Unable to serialize unknown type"),
    ],
)
async def test_a_result_that_cannot_be_written_is_a_tool_error_that_says_so(result: object, why: str) -> None:
    @tool
    async def give() -> object:
        return result

    with pytest.raises(ToolError) as refused:
        await give.run({})
    assert str(refused.value).startswith("The result of give cannot be written: ")
    assert why in str(refused.value)


def image(url: str) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url}}


def text(text: str) -> dict[str, object]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    ("result", "parts"),
    [
        (Image(b"\x89PNG"), [image("data:image/png;base64,iVBORw==")]),
        (Image(b"abc", media_type="image/jpeg"), [image("data:image/jpeg;base64,YWJj")]),
        (
            ["Before", Image(b"abc"), "after", 3, {"a": 1}],
            [text("Before"), image("data:image/png;base64,YWJj"), text("after"), text("3"), text('{"a": 1}')],
        ),
        ((Image(b"a"), Image(b"b")), [image("data:image/png;base64,YQ=="), image("data:image/png;base64,Yg==")]),
    ],
)
@pytest.mark.parametrize("threaded", [True, False])
async def test_images_become_parts(result: object, parts: list[object], threaded: bool) -> None:
    @tool
    async def awaited() -> object:
        return result

    @tool
    def plain() -> object:
        return result

    assert await (plain if threaded else awaited).run({}) == parts


async def test_images_of_pil_become_parts() -> None:
    pil = pytest.importorskip("PIL.Image", reason="needs Pillow, which nothing here installs")

    @tool
    def draw() -> object:
        return ["A dot", pil.new("RGB", (1, 1))]

    _, part = await draw.run({})
    assert str(part).startswith("{'type': 'image_url', 'image_url': {'url': 'data:image/png;base64,iVBOR")


@pytest.mark.parametrize("data", [b"", "text", None, 3])
def test_an_image_has_bytes(data: object) -> None:
    with pytest.raises(TypeError, match="the bytes of an image file"):
        Image(data)  # type: ignore[arg-type]


@pytest.mark.parametrize("media_type", ["png", "text/html", "image/", 'image/png"', "image/png;x=1", None])
def test_an_image_has_the_media_type_of_one(media_type: object) -> None:
    with pytest.raises(ValueError, match="media_type"):
        Image(b"x", media_type)  # type: ignore[arg-type]


def test_an_image_does_not_show_its_bytes() -> None:
    assert repr(Image(b"secret")) == "Image(6 bytes, media_type='image/png')"
