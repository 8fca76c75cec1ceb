"""Port to what traces rollouts. What is called while one of its contexts is open belongs to that context's span."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Protocol, TypeAlias

from rollout_server.core.record import Record, ToolStarted
from rollout_server.core.spec import Target
from rollout_server.runtime.outcome_delivery import Receipt
from rollout_server.runtime.ports import CompletionRequest
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.tools.executor import ToolResult

Traced: TypeAlias = "Sequence[Record] | ToolResult | Receipt"
"""What came of a span: the records of a completion, the result of a tool call, or the receipt of an attempt to deliver."""
OpenSpan: TypeAlias = AbstractContextManager[Callable[[Traced], None]]
"""A span that is open as long as its context. It yields a function that is called with the result, if there is one."""


class Tracer(Protocol):
    """Traces the rollouts of a server. Its methods run on the event loop and must neither block nor raise."""

    def rollout(self, rollout: Rollout) -> AbstractContextManager[object]:
        """Open the span of a rollout, which runs in this context. The span ends with the record of the rollout's end."""

    def completion(self, rollout: Rollout, request: CompletionRequest, target: Target, model: str = "") -> OpenSpan:
        """Open the span of a completion with all its attempts. `model` is the name of a further model that is called."""

    def tool(self, rollout: Rollout, started: ToolStarted) -> OpenSpan:
        """Open the span of a tool call."""

    def delivery(self, rollout: Rollout, target: Target, attempt: int) -> OpenSpan:
        """Open the span of one attempt to deliver the outcome."""


def _ignore(result: Traced) -> None:
    """Do nothing with a result."""


UNTRACED: Final[OpenSpan] = nullcontext(_ignore)


class NoTracer:
    """A tracer that does nothing: the default."""

    def rollout(self, rollout: Rollout) -> AbstractContextManager[object]:
        """Open nothing."""
        return UNTRACED

    def completion(self, rollout: Rollout, request: CompletionRequest, target: Target, model: str = "") -> OpenSpan:
        """Open nothing."""
        return UNTRACED

    def tool(self, rollout: Rollout, started: ToolStarted) -> OpenSpan:
        """Open nothing."""
        return UNTRACED

    def delivery(self, rollout: Rollout, target: Target, attempt: int) -> OpenSpan:
        """Open nothing."""
        return UNTRACED
