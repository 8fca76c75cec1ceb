"""Options of a tool (timeout, retries, cache, ...), and errors for invalid ones, with file and line."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
from rollout_server import tool
from rollout_server.runtime.tools.protocols import ServerRunTool
from rollout_server.tool import FunctionTool, ToolPolicy
from rollout_server.tool.function import Policy


def lookup(key: str) -> str:
    """Looks it up."""
    return key


def test_a_plain_decorator_has_the_plain_policy() -> None:
    assert tool(lookup).policy == ToolPolicy()
    assert isinstance(tool(lookup), ServerRunTool)


def test_keywords_become_the_policy() -> None:
    @tool(timeout=5, retries=2, idempotent=True, cache=True, cache_seconds=60.0, concurrency=1, server_concurrency=4)
    async def f(a: int) -> int:
        return a

    assert isinstance(f, FunctionTool)
    assert f.policy == ToolPolicy(
        timeout=5, retries=2, idempotent=True, cache=True, cache_seconds=60.0, concurrency=1, server_concurrency=4
    )


def test_the_keywords_are_the_fields_of_a_policy() -> None:
    assert set(Policy.__annotations__) == {field.name for field in fields(ToolPolicy)}


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ({"timeout": 0}, "timeout must be a positive number of seconds, not 0"),
        ({"timeout": -1.0}, "timeout must be a positive"),
        ({"timeout": math.inf}, "timeout must be a positive"),
        ({"timeout": math.nan}, "timeout must be a positive"),
        ({"retries": 1}, "retries need a tool that may be called again: set idempotent=True"),
        ({"retries": -1, "idempotent": True}, "retries must be at least 0, not -1"),
        ({"cache": True}, "cache needs a tool that returns the same result again: set idempotent=True"),
        ({"cache_seconds": 5.0, "idempotent": True}, "cache_seconds needs cache=True"),
        ({"concurrency": 0}, "concurrency must be at least 1, not 0"),
        ({"server_concurrency": 0}, "server_concurrency must be at least 1, not 0"),
        ({"max_output_tokens": 0}, "max_output_tokens must be at least 1, not 0"),
        ({"memory_bytes": 10**9}, "memory_bytes and cpu_seconds limit a process: set process=True"),
        ({"cpu_seconds": 1}, "memory_bytes and cpu_seconds limit a process: set process=True"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(policy: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        tool(**policy)


@pytest.mark.parametrize(
    "policy",
    [
        {"timeout": "5"},
        {"timeout": True},
        {"retries": 1.5, "idempotent": True},
        {"concurrency": True},
        {"idempotent": "yes"},
        {"cache": 60},
        {"process": "always"},
        {"time_out": 5},
    ],
)
def test_a_policy_of_other_types_or_words_is_refused(policy: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        tool(**policy)


class Shop:
    def price(self, of: str) -> int:
        return len(of)


def inner() -> Callable[..., object]:
    def hidden(a: int) -> int:
        return a

    return hidden


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (inner(), "tool 'hidden': a process imports its tool by name, and this function is defined inside inner"),
        (Shop().price, "tool 'price': a process imports its tool by name, and this function is a method of an object"),
    ],
)
def test_a_function_that_cannot_be_imported_gets_no_process(function: Callable[..., object], says: str) -> None:
    with pytest.raises(ValueError, match=says) as refused:
        tool(process=True)(function)
    assert f"{__file__}:" in str(refused.value)


def test_what_is_wrong_with_a_function_is_told_with_file_and_line() -> None:
    def untyped(a) -> None: ...  # type: ignore[no-untyped-def]

    line = untyped.__code__.co_firstlineno
    with pytest.raises(TypeError) as refused:
        tool(timeout=5)(untyped)
    assert str(refused.value) == f"tool 'untyped': parameter a needs a type annotation ({__file__}:{line})"


async def test_run_outside_a_server_has_no_process() -> None:
    with pytest.raises(Exception, match="which only a server starts"):
        await tool(process=True)(lookup).run({"key": "a"})
