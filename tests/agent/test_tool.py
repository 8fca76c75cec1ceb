"""Tools made of functions: their description, arguments and results as the model sees them."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from collections.abc import Mapping
from typing import Annotated

import pytest
from rollout_server import ToolError, tool
from rollout_server.runtime.ports import Tool

from tests.agent.shapes import Number


def test_a_tool_has_the_name_and_docstring_of_its_function() -> None:
    @tool
    async def add(a: Number, b: Number) -> Number:
        """Add two numbers.

        All of them.
        """
        return a + b

    port: Tool = add
    assert (port.name, port.description) == ("add", "Add two numbers.\n\nAll of them.")


def test_a_tool_is_its_own_tool_and_its_function_stays_callable() -> None:
    @tool
    def double(a: int) -> int:
        return 2 * a

    assert tool(double) is double
    assert double(4) == 8


def test_a_method_is_a_tool_of_its_object() -> None:
    class Shop:
        def __init__(self, prices: Mapping[str, int]) -> None:
            self.prices = prices

        async def price(self, of: Annotated[str, "What to buy"]) -> int:
            """Look up a price"""
            return self.prices[of]

    price = tool(Shop({"tea": 3}).price)
    assert json.loads(price.parameters_json_schema)["required"] == ["of"]
    assert asyncio.run(price.run({"of": "tea"})) == "3"


async def test_a_coroutine_function_runs_on_the_loop_and_a_plain_one_in_a_thread() -> None:
    @tool
    async def here() -> int:
        return threading.get_ident()

    @tool
    def there() -> int:
        return threading.get_ident()

    assert await here.run({}) == str(threading.get_ident())
    assert await there.run({}) != str(threading.get_ident())


async def test_a_plain_function_does_not_hold_the_loop() -> None:
    go = threading.Event()

    @tool
    def hold() -> bool:
        return go.wait(60)

    held = asyncio.create_task(hold.run({}))
    await asyncio.sleep(0)
    go.set()
    assert await held == "true"


async def test_a_cancelled_call_leaves_its_thread_alone() -> None:
    go, left = threading.Event(), threading.Event()

    @tool
    def hold() -> None:
        go.wait(60)
        left.set()

    held = asyncio.create_task(hold.run({}))
    await asyncio.sleep(0)
    held.cancel()
    with pytest.raises(asyncio.CancelledError):
        await held
    assert not left.is_set()
    go.set()
    assert await asyncio.to_thread(left.wait, 60)


async def test_a_plain_function_that_returns_a_coroutine_is_awaited() -> None:
    async def later(a: int) -> int:
        return 2 * a

    @tool
    @functools.wraps(later)
    def wrapped(a: int) -> object:
        return later(a)

    assert await wrapped.run({"a": 4}) == "8"


@pytest.mark.parametrize("error", [LookupError("gone"), ToolError("closed"), StopIteration()])
async def test_what_a_function_raises_passes(error: Exception) -> None:
    @tool
    def plain() -> None:
        raise error

    @tool
    async def awaited() -> None:
        raise error

    expected = RuntimeError if isinstance(error, StopIteration) else type(error)
    for each in (plain, awaited):
        with pytest.raises(expected):
            await each.run({})


async def test_defaults_that_can_change_are_not_shared_between_calls() -> None:
    @tool
    async def collect(item: int, into: list[int] = []) -> list[int]:  # noqa: B006 - authors write it, too
        into.append(item)
        return into

    assert [await collect.run({"item": number}) for number in (1, 2)] == ["[1]", "[2]"]
