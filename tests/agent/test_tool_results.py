"""What the model reads of a tool's result."""

from __future__ import annotations

import math
import threading
from datetime import date
from decimal import Decimal

import pytest
from rollout_server import ToolError, tool

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
    ],
)
async def test_how_results_are_written(result: object, content: str) -> None:
    @tool
    async def give() -> object:
        return result

    assert await give.run({}) == content


CIRCLE: list[object] = []


CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    ("result", "why"),
    [
        pytest.param(10**5000, "too many digits", id="digits"),
        (math.inf, "inf is not a finite number"),
        (math.nan, "nan is not a finite number"),
        ([math.inf], "not JSON compliant"),
        (object(), "Unable to serialize unknown type"),
        ({"a": threading.Lock()}, "Unable to serialize unknown type"),
        (CIRCLE, "Circular reference"),
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
