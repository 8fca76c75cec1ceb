"""Completions, tool calls and deliveries that are under way, and what they add to traces and metrics.

While an operation runs, its span has ids and a time. What it says is written after the end, together with that of other operations:
code that runs many times in a row takes a fraction of the time that it takes between requests and renderings.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from time import perf_counter, time_ns
from types import TracebackType
from typing import ClassVar, Final, TypeAlias

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode

from rollout_server.core.outcome import Failure
from rollout_server.core.record import ToolStarted
from rollout_server.core.spec import Target
from rollout_server.edge.tracing import attributes as made
from rollout_server.edge.tracing import contents
from rollout_server.edge.tracing import conventions as names
from rollout_server.edge.tracing.meters import Meters
from rollout_server.runtime.errors import RolloutEnded, RolloutFailed
from rollout_server.runtime.ports import CompletionRequest
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.run.tracer import Traced
from rollout_server.runtime.tools.executor import ToolResult

_log = logging.getLogger(__name__)
_SECONDS: Final = 1.0
"""How long an operation that has ended may wait to be written."""
_MOST: Final = 32
"""Operations that are written together: a millisecond of the event loop at most."""
Description: TypeAlias = tuple[str, SpanKind, made.Attributes]


class Guard:
    """Suppresses what the SDK, its processors and samplers raise within its blocks, and logs the first of it."""

    _logged = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> bool:
        if isinstance(error, Exception):
            self.log(error)
        return isinstance(error, Exception)

    def log(self, error: Exception) -> None:
        """Log the first error."""
        if not self._logged:
            self._logged = True
            _log.warning("spans or metrics are incomplete, and further errors are not logged", exc_info=error)


class EndedOperations:
    """Operations that have ended and are not yet written.

    Args:
        meters: the metrics; None if they are not exported.
        captures: whether messages, arguments and results are exported.
        guard: for what the SDK raises.
    """

    def __init__(self, meters: Meters | None, guard: Guard, *, captures: bool) -> None:
        self._meters = meters
        self._captures = captures
        self._guard = guard
        self._ended: list[TracedOperation] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, operation: TracedOperation) -> None:
        """Add one that has ended now."""
        self._ended.append(operation)
        if len(self._ended) >= _MOST:
            self.write()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_SECONDS, self.write)

    def write(self) -> None:
        """End the spans of all operations with what they say, and count them."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ended, self._ended = self._ended, []
        for operation in ended:
            try:
                operation.write(self._meters, captures=self._captures)
            except Exception as error:
                self._guard.log(error)


class TracedOperation(ABC):
    """A completion, a tool call or a delivery: a context that yields itself, to be called with the result.

    Its methods except those of the context are called after its end, but `describe` also if somebody reads its span before.

    Args:
        rollout: to which it belongs.
        ended: gets it at its end.
    """

    __slots__ = (
        "_began",
        "_context",
        "_ended",
        "_ended_at",
        "_error",
        "_result",
        "_seconds",
        "_span",
        "_token",
        "rollout",
    )
    kind: ClassVar = SpanKind.CLIENT

    def __init__(self, rollout: Rollout, ended: EndedOperations) -> None:
        self.rollout = rollout
        self._error: made.Attributes = {}
        self._ended = ended
        self._span: Span | None = None
        self._result: Traced | None = None

    def open(self, span: Span, context: Context) -> None:
        """Give it its span, which is the current one while it runs. `context` is the one around it."""
        self._span = span
        self._context = trace.set_span_in_context(span, context)

    @abstractmethod
    def describe(self) -> Description:
        """Return name, kind and attributes with which the span begins."""

    @abstractmethod
    def result_attributes(self, result: Traced) -> made.Attributes:
        """Return what the result adds to the attributes."""

    def content_attributes(self, result: Traced | None) -> made.Attributes:
        """Return messages, arguments and results, as attributes. Without a result there are only those that were sent."""
        return {}

    @abstractmethod
    def count(self, meters: Meters, seconds: float, error: str | None) -> None:
        """Count it with the metrics. `error`: its `error.type`."""

    def __enter__(self) -> Callable[[Traced], None]:
        if self._span is not None:
            self._token = contexts.attach(self._context)
        self._began = perf_counter()
        return self

    def __call__(self, result: Traced) -> None:
        self._result = result

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._seconds = perf_counter() - self._began
        if error is not None:
            self._error = _error_attributes(error)
        if self._span is not None:
            self._ended_at = time_ns()
            contexts.detach(self._token)
        self._ended.add(self)

    def write(self, meters: Meters | None, *, captures: bool) -> None:
        """End the span, and count the operation."""
        span, result, error = self._span, self._result, None
        try:
            found = {} if result is None else self.result_attributes(result)
            found |= self._error
            error = found.get(names.ERROR)
            if span is not None:
                if error is not None:
                    span.set_status(StatusCode.ERROR)
                # A span of this server's own takes attributes as they are.
                add = getattr(span, "add", span.set_attributes)
                add(found)
                if captures:
                    add(self.content_attributes(result))
        finally:  # what cannot be said must not cost the span or the count
            if span is not None:
                span.end(self._ended_at)
            if meters is not None:
                self.count(meters, self._seconds, None if error is None else str(error))


def _error_attributes(error: BaseException) -> made.Attributes:
    """Return the `error.type` of what an operation raised, and more of a failure; nothing if the rollout ended otherwise."""
    failure = error.failure if isinstance(error, RolloutFailed) else None
    if isinstance(error, RolloutEnded):
        if not isinstance(error.end, Failure):
            return {}
        failure = error.end
    if failure is not None:
        return made.failure_attributes(failure)
    return {names.ERROR: "cancelled" if isinstance(error, asyncio.CancelledError) else type(error).__name__}


class TracedCompletion(TracedOperation):
    """A completion with all its attempts. `model` is the name of a further model that is called."""

    __slots__ = ("_model", "_request", "_target", "_usage")

    def __init__(
        self, rollout: Rollout, ended: EndedOperations, request: CompletionRequest, target: Target, model: str
    ) -> None:
        super().__init__(rollout, ended)
        self._request = request
        self._target = target
        self._model = model
        self._usage: tuple[int, int] | None = None

    def describe(self) -> Description:
        """See `TracedOperation`."""
        target = self._target
        name = f"{names.CHAT} {target.model}" if target.model else names.CHAT
        return name, self.kind, made.completion_attributes(self.rollout, self._request, target, self._model)

    def result_attributes(self, result: Traced) -> made.Attributes:
        """See `TracedOperation`."""
        if not isinstance(result, tuple | list):
            return {}
        self._usage = made.usage_of(self.rollout, result)
        return made.completed_attributes(result, self._usage)

    def content_attributes(self, result: Traced | None) -> made.Attributes:
        """See `TracedOperation`."""
        request = self._request
        sent: made.Attributes = {
            names.INPUT_MESSAGES: contents.input_messages(request.messages[: request.asked.messages])
        }
        return (
            sent | {names.OUTPUT_MESSAGES: contents.output_messages(result)}
            if isinstance(result, tuple | list)
            else sent
        )

    def count(self, meters: Meters, seconds: float, error: str | None) -> None:
        """See `TracedOperation`."""
        meters.completion(seconds, self._target, self._usage, error)


class TracedToolCall(TracedOperation):
    """A tool call. `started` is the record of its beginning."""

    __slots__ = ("_started",)
    kind = SpanKind.INTERNAL

    def __init__(self, rollout: Rollout, ended: EndedOperations, started: ToolStarted) -> None:
        super().__init__(rollout, ended)
        self._started = started

    def describe(self) -> Description:
        """See `TracedOperation`."""
        found = made.tool_attributes(self.rollout, self._started)
        return f"{names.EXECUTE_TOOL} {found[names.TOOL_NAME]}", self.kind, found

    def result_attributes(self, result: Traced) -> made.Attributes:
        """See `TracedOperation`."""
        return {names.ERROR: "tool_error"} if isinstance(result, ToolResult) and result.failed else {}

    def content_attributes(self, result: Traced | None) -> made.Attributes:
        """See `TracedOperation`."""
        sent: made.Attributes = {names.TOOL_ARGUMENTS: contents.tool_text(self._started.call.arguments)}
        return (
            sent | {names.TOOL_RESULT: contents.tool_text(result.content)} if isinstance(result, ToolResult) else sent
        )

    def count(self, meters: Meters, seconds: float, error: str | None) -> None:
        """See `TracedOperation`."""
        meters.tool(seconds, self.rollout.agent, self._started.call.name, error)


class TracedDelivery(TracedOperation):
    """An attempt to deliver an outcome."""

    __slots__ = ("_attempt", "_target")

    def __init__(self, rollout: Rollout, ended: EndedOperations, target: Target, attempt: int) -> None:
        super().__init__(rollout, ended)
        self._target = target
        self._attempt = attempt

    def describe(self) -> Description:
        """See `TracedOperation`."""
        return names.DELIVER, self.kind, made.delivery_attributes(self.rollout, self._target, self._attempt)

    def result_attributes(self, result: Traced) -> made.Attributes:
        """See `TracedOperation`."""
        error = "" if isinstance(result, Sequence | ToolResult) else made.delivery_error(result)
        return {names.ERROR: error} if error else {}

    def count(self, meters: Meters, seconds: float, error: str | None) -> None:
        """Count nothing: Prometheus has the deliveries."""
