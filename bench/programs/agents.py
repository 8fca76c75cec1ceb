"""Agents of the server under test. They offer the calculator's tools, because the bench trainer renders one set of tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollout_server.agent.external import ExternalAgent
from rollout_server.calculator import Calculator
from rollout_server.core.message import JSON
from rollout_server.runtime.ports import Content, Tool

LONG_RESULT = 1_000_000
"""Bytes that `Verbose` appends to each tool result."""


class OwnLoop(ExternalAgent):
    """The agent behind the captured endpoint: it runs elsewhere, which is in the driver."""

    name = "own-loop"
    tools = Calculator.tools


@dataclass(frozen=True, slots=True)
class _Verbose:
    tool: Tool

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
        return lengthened(str(await self.tool.run(arguments)), LONG_RESULT)


class Verbose(Calculator):
    """The calculator with long tool results."""

    name = "verbose"
    tools = tuple(_Verbose(tool) for tool in Calculator.tools)


def lengthened(result: str, size: int) -> str:
    """Return a result with `size` bytes of text after it."""
    line = "\nThe quick brown fox jumps over the lazy dog, and 12 of them sleep."
    return result + (line * (size // len(line) + 1))[:size]
