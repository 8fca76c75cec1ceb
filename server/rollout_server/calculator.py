"""The built-in calculator, the default agent of `rollout serve`."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Annotated, TypeAlias

from rollout_server.agent import Agent
from rollout_server.core.message import JSON
from rollout_server.runtime.errors import ToolError
from rollout_server.runtime.ports import Content, Tool
from rollout_server.runtime.run.messages import text_of
from rollout_server.runtime.run.run import Run
from rollout_server.tool import tool

Number: TypeAlias = int | float

_MARKER = re.compile(r"(?<!#)####(?!#)[ \t]*(\S*)")
_GROUPED = re.compile(r"[+-]?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]*)?")
_PLAIN = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


@tool(idempotent=True)
async def add(a: Annotated[Number, "First number"], b: Annotated[Number, "Second number"]) -> Number:
    """Add two numbers"""
    return _finite(lambda: a + b)


@tool(idempotent=True)
async def subtract(
    a: Annotated[Number, "First number"], b: Annotated[Number, "Second number to subtract from first"]
) -> Number:
    """Subtract two numbers"""
    return _finite(lambda: a - b)


@tool(idempotent=True)
async def multiply(a: Annotated[Number, "First number"], b: Annotated[Number, "Second number"]) -> Number:
    """Multiply two numbers"""
    return _finite(lambda: a * b)


@tool(idempotent=True)
async def divide(a: Annotated[Number, "Numerator"], b: Annotated[Number, "Denominator (cannot be zero)"]) -> Number:
    """Divide two numbers"""
    if b == 0:
        raise ToolError("Division by zero")
    return _finite(lambda: a / b)


class Calculator(Agent):
    """Calculates with four tools. The reward compares the final answer with `metadata.ground_truth`.

    Args:
        delay: seconds that are added to each tool call, to simulate slow tools.
    """

    name = "calculator"
    tools: Sequence[Tool] = (add, subtract, multiply, divide)

    def __init__(self, delay: float = 0.0) -> None:
        if not 0 <= delay < math.inf:
            raise ValueError(f"delay must be a finite number of seconds, 0 or more, not {delay!r}")
        if delay:
            self.tools = tuple(_Delayed(tool, delay) for tool in self.tools)

    async def reward(self, run: Run) -> float | None:
        """Return 1.0 if the number after the last `####` of the final answer equals the ground truth, else 0.0.

        Return None without a ground truth or if it is not a number: no completion could be correct, so 0.0 would be a wrong
        signal.
        """
        truth = _truth(run.metadata.get("ground_truth"))
        if truth is None:
            return None
        answers = [message for message in run.messages if message["role"] == "assistant"] if run.turn else []
        markers = _MARKER.findall(text_of(answers[-1].get("content"))) if answers else []
        return float(bool(markers) and _number(markers[-1]) == truth)


@dataclass(frozen=True, slots=True)
class _Delayed:
    """A tool that sleeps before each call."""

    tool: Tool
    seconds: float

    @property
    def name(self) -> str:
        return self.tool.name

    @property
    def description(self) -> str:
        return self.tool.description

    @property
    def parameters_json_schema(self) -> str:
        return self.tool.parameters_json_schema

    async def run(self, arguments: Mapping[str, JSON]) -> Content:
        await asyncio.sleep(self.seconds)
        return await self.tool.run(arguments)


def _finite(compute: Callable[[], Number]) -> Number:
    try:
        result = compute()
    except OverflowError:
        result = math.inf
    if isinstance(result, float) and not math.isfinite(result):
        raise ToolError("The result is too large")
    return result


def _truth(value: JSON) -> Decimal | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    return _number(str(value).strip())


def _number(text: str) -> Decimal | None:
    """Return the exact value of a number as a model or dataset writes it, or None.

    Accepts currency signs, emphasis (`**8**`), trailing punctuation and thousands separators.
    """
    bare = text.strip("*_`$€£").rstrip(".,;:!?").replace("\N{MINUS SIGN}", "-")
    if _GROUPED.fullmatch(bare):
        bare = bare.replace(",", "")
    if not _PLAIN.fullmatch(bare):
        return None
    try:
        return Decimal(bare)
    except InvalidOperation:  # the exponent is out of Decimal's range
        return None
