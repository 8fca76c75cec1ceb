"""The spans of rollouts: one trace from the caller's span over the rollout to its completions, tools and deliveries.

A span is open while the work is done, and is then the current one of its task, so that requests, programs and instrumented
libraries join the trace. The span of a rollout ends when its end is published.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from weakref import WeakKeyDictionary

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanKind, StatusCode

from rollout_server.core.outcome import Failure
from rollout_server.core.record import Ended, ToolStarted
from rollout_server.core.spec import Target
from rollout_server.edge.tracing import attributes as made
from rollout_server.edge.tracing import contents
from rollout_server.edge.tracing import conventions as names
from rollout_server.edge.tracing.meters import Meters
from rollout_server.edge.tracing.propagation import is_dropped, remote_context
from rollout_server.runtime.errors import RolloutEnded, RolloutFailed
from rollout_server.runtime.log import Entry
from rollout_server.runtime.ports import CompletionRequest
from rollout_server.runtime.registry.dependencies import Attempt
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.run.tracer import UNTRACED, OpenSpan, Traced
from rollout_server.runtime.tools.executor import ToolResult

if TYPE_CHECKING:
    from rollout_server.edge.tracing.child_spans import ChildTracer

_log = logging.getLogger(__name__)
_UID: Final = contexts.create_key("rollout uid")
_MOST_EVALUATIONS: Final = 64
_Parent: TypeAlias = tuple[Context, Span]
"""The context in which a span begins, and the span that is current there."""


@dataclass(frozen=True, slots=True)
class RolloutSpan:
    """The span of a rollout, and the context of everything in it."""

    span: Span
    context: Context
    trace_id: int


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
        """Log the first error. What runs for every span catches it itself, which costs nothing until there is one."""
        if not self._logged:
            self._logged = True
            _log.warning("spans or metrics are incomplete, and further errors are not logged", exc_info=error)


class Tracing:
    """Traces the rollouts of one server, and counts them: a `Tracer` and an `Observer`.

    Args:
        tracer: of the process's provider; it may do nothing.
        meters: the metrics; None if they are not exported.
        own: the tracer, if it is this server's own. Below a span that it does not sample, nothing is sampled.
        records: whether there are spans at all, not only metrics.
        captures: whether messages, arguments and results are exported.
    """

    def __init__(
        self,
        tracer: trace.Tracer,
        meters: Meters | None,
        *,
        own: ChildTracer | None,
        records: bool,
        captures: bool,
    ) -> None:
        self.tracer = tracer
        self.meters = meters
        self.captures = captures
        self._own = own
        self._records = records
        self.guard = Guard()
        self._spans: WeakKeyDictionary[Rollout, RolloutSpan] = WeakKeyDictionary()
        self._open: dict[str, Rollout] = {}

    def rollout(self, rollout: Rollout) -> AbstractContextManager[object]:
        """See `Tracer`."""
        return _RolloutScope(self._begin(rollout).context, lambda: self._on_left(rollout))

    def completion(self, rollout: Rollout, request: CompletionRequest, target: Target, model: str = "") -> OpenSpan:
        """See `Tracer`."""
        parent = self._next_parent(rollout)
        scope = _CompletionScope(self, rollout, target)
        if parent is None:
            return UNTRACED if self.meters is None else scope
        name = f"{names.CHAT} {target.model}" if target.model else names.CHAT
        scope.start(parent, name, SpanKind.CLIENT, made.completion_attributes(rollout, request, target, model))
        sent = request.asked.messages
        scope.capture(lambda: {names.INPUT_MESSAGES: contents.input_messages(request.messages[:sent])})
        return scope

    def tool(self, rollout: Rollout, started: ToolStarted) -> OpenSpan:
        """See `Tracer`."""
        parent = self._next_parent(rollout)
        scope = _ToolScope(self, rollout, started.call.name)
        if parent is None:
            return UNTRACED if self.meters is None else scope
        given = made.tool_attributes(rollout, started)
        scope.start(parent, f"{names.EXECUTE_TOOL} {given[names.TOOL_NAME]}", SpanKind.INTERNAL, given)
        scope.capture(lambda: {names.TOOL_ARGUMENTS: contents.tool_text(started.call.arguments)})
        return scope

    def delivery(self, rollout: Rollout, target: Target, attempt: int) -> OpenSpan:
        """See `Tracer`. The outcome of an earlier process has no span of a rollout here: its caller's is the parent."""
        parent = self._next_parent(rollout)
        if parent is None:
            return UNTRACED
        scope = _DeliveryScope(self, rollout)
        scope.start(parent, names.DELIVER, SpanKind.CLIENT, made.delivery_attributes(rollout, target, attempt))
        return scope

    def recorded(self, rollout: Rollout, entries: Sequence[Entry]) -> None:
        """End the span of a rollout with its outcome. One that never had a slot gets its span now."""
        ended = entries[-1].record
        if not isinstance(ended, Ended) or (outcome := rollout.outcome) is None:
            return
        if self.meters is not None:
            with self.guard:
                self.meters.ended(rollout, ended)
        found = self._spans.get(rollout) if rollout.uid in self._open else self._begin(rollout, rollout.created)
        self._open.pop(rollout.uid, None)
        if found is None:
            return
        span = found.span
        with self.guard:
            if span.is_recording():
                span.set_attributes(made.outcome_attributes(outcome, ended))
                for evaluation in made.evaluations(outcome, _MOST_EVALUATIONS):
                    span.add_event(names.EVALUATION, evaluation)
                if isinstance(outcome.end, Failure):
                    span.set_status(StatusCode.ERROR)
        self._end(rollout, found, int(entries[-1].time * 1e9))

    def delivered(self, rollout: Rollout, attempt: Attempt, milliseconds: float) -> None:
        """Do nothing: each attempt has a span."""

    def close(self) -> None:
        """End the spans of rollouts that were suspended while they waited for their group."""
        for rollout in tuple(self._open.values()):
            self._suspend(rollout)

    def _begin(self, rollout: Rollout, created: float | None = None) -> RolloutSpan:
        parent = remote_context(rollout.trace)
        above = trace.get_current_span(parent)
        caller, links = above.get_span_context(), []
        if rollout.had_to_wait and caller.is_valid:
            first = 1 if created is None else 2  # of one that never ran: that it was accepted, and its end
            continued = rollout.is_restored and len(rollout.log.entries) > first
            links.append(Link(caller, {names.LINK: "resumed" if continued else "queued"}))
        name, given = f"{names.INVOKE_AGENT} {rollout.agent.name}", made.rollout_attributes(rollout)
        time = None if created is None else int(created * 1e9)
        span = self.start((parent, above), name, SpanKind.INTERNAL, given, links, time)
        context = trace.set_span_in_context(span, contexts.set_value(_UID, rollout.uid, Context()))
        begun = RolloutSpan(span, context, span.get_span_context().trace_id)
        self._spans[rollout] = begun
        self._open[rollout.uid] = rollout
        return begun

    def start(
        self, parent: _Parent, name: str, kind: SpanKind, attributes: made.Attributes, *links_and_time: Any
    ) -> Span:
        """Start a span. If that raises, what would be below the span is below its parent."""
        context, above = parent
        try:
            if self._own is not None and not links_and_time and above.is_recording():
                return self._own.start_below(above, name, kind, attributes)
            return self.tracer.start_span(name, context, kind, attributes, *links_and_time)
        except Exception as error:
            self.guard.log(error)
        return NonRecordingSpan(above.get_span_context())

    def _end(self, rollout: Rollout, ended: RolloutSpan, time: int | None = None) -> None:
        """End the span of a rollout, of which only the ids are kept: it may be retained for long."""
        with self.guard:
            ended.span.end(time)
        ids = NonRecordingSpan(ended.span.get_span_context())
        self._spans[rollout] = replace(ended, span=ids, context=trace.set_span_in_context(ids, ended.context))

    def _on_left(self, rollout: Rollout) -> None:
        if rollout.is_suspended and rollout.uid in self._open:
            self._suspend(rollout)

    def _suspend(self, rollout: Rollout) -> None:
        """End the span of a rollout that a later process continues, or whose acceptance could not be stored."""
        del self._open[rollout.uid]
        found = self._spans.get(rollout)
        if found is not None:
            found.span.set_attribute(names.END, "refused" if rollout.log.is_abandoned else "suspended")
            self._end(rollout, found)

    def _next_parent(self, rollout: Rollout) -> _Parent | None:
        """Return where a rollout's next span begins. None if there is no need for it: below the current span nothing is exported.

        It is the current context if that belongs to the rollout: of a tool that calls the model, or of a client that an agent's
        program has traced in the same trace.
        """
        current = contexts.get_current()
        above, owner = trace.get_current_span(current), current.get(_UID)
        if owner == rollout.uid:
            skips = is_dropped(above) if self._own is not None else not self._records
            return None if skips else (current, above)
        found = self._spans.get(rollout)
        if found is None:
            context = remote_context(rollout.trace)
        elif owner is None and above.get_span_context().trace_id == found.trace_id:
            return contexts.set_value(_UID, rollout.uid, current), above
        else:
            context = found.context
        return context, trace.get_current_span(context)


class _RolloutScope:
    """The context in which a rollout runs."""

    def __init__(self, context: Context, left: Callable[[], None]) -> None:
        self._context = context
        self._left = left

    def __enter__(self) -> None:
        self._token = contexts.attach(self._context)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        contexts.detach(self._token)
        self._left()


class _OperationScope:
    """A part of a rollout that is under way: its span, if it has one, and what its metrics need. It is called with the result.

    A span of this server's own shares its dict of attributes with its scope (`_kept`); any other gets each addition.
    """

    __slots__ = ("_began", "_context", "_kept", "_span", "_token", "error", "rollout", "tracing")

    def __init__(self, tracing: Tracing, rollout: Rollout) -> None:
        self.tracing = tracing
        self.rollout = rollout
        self.error: str | None = None
        self._span: Span | None = None

    def start(self, parent: _Parent, name: str, kind: SpanKind, attributes: made.Attributes) -> None:
        """Start a span, which is the current one within the scope."""
        self._span = self.tracing.start(parent, name, kind, attributes)
        self._kept: made.Attributes | None = getattr(self._span, "kept", None)
        self._context = trace.set_span_in_context(self._span, parent[0])

    def __call__(self, result: Traced) -> None:
        try:
            self.take(result)
        except Exception as error:
            self.tracing.guard.log(error)

    def take(self, result: Traced) -> None:
        """Add what the result says."""
        raise NotImplementedError

    def capture(self, contents: Callable[[], made.Attributes]) -> None:
        """Add messages, arguments or results to the span, if they are exported."""
        if self.tracing.captures and self._span is not None and self._span.is_recording():
            with self.tracing.guard:
                self.add(contents())

    def count(self, meters: Meters, seconds: float) -> None:
        """Count it with the metrics, after its end."""

    def add(self, attributes: made.Attributes) -> None:
        """Add attributes to the span."""
        if self._span is not None:
            if self._kept is not None:
                self._kept |= attributes
            else:
                self._span.set_attributes(attributes)

    def fail(self, error: str, failure: made.Attributes | None = None) -> None:
        """Mark it as failed, with its `error.type`."""
        self.error = error
        if self._span is not None:
            self.add({names.ERROR: error, **(failure or {})})
            self._span.set_status(StatusCode.ERROR)

    def __enter__(self) -> Callable[[Traced], None]:
        if self._span is not None:
            self._token = contexts.attach(self._context)
        self._began = perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        seconds, meters = perf_counter() - self._began, self.tracing.meters
        if error is not None:
            with self.tracing.guard:
                self._fail_with(error)
        if self._span is not None:
            contexts.detach(self._token)
            try:
                self._span.end()
            except Exception as failed:
                self.tracing.guard.log(failed)
        if meters is not None:
            try:
                self.count(meters, seconds)
            except Exception as failed:
                self.tracing.guard.log(failed)

    def _fail_with(self, error: BaseException) -> None:
        failure = error.failure if isinstance(error, RolloutFailed) else None
        if isinstance(error, RolloutEnded):
            if not isinstance(error.end, Failure):
                return
            failure = error.end
        if failure is not None:
            self.fail(failure.category.value, made.failure_attributes(failure))
        else:
            self.fail("cancelled" if isinstance(error, asyncio.CancelledError) else type(error).__name__)


class _CompletionScope(_OperationScope):
    __slots__ = ("_target", "_usage")

    def __init__(self, tracing: Tracing, rollout: Rollout, target: Target) -> None:
        super().__init__(tracing, rollout)
        self._target = target
        self._usage: tuple[int, int] | None = None

    def take(self, result: Traced) -> None:
        if isinstance(result, tuple | list):
            self._usage = made.usage_of(self.rollout, result)
            if self._span is not None:
                self.add(made.completed_attributes(result, self._usage))
                self.capture(lambda: {names.OUTPUT_MESSAGES: contents.output_messages(result)})

    def count(self, meters: Meters, seconds: float) -> None:
        meters.completion(seconds, self._target, self._usage, self.error)


class _ToolScope(_OperationScope):
    __slots__ = ("_name",)

    def __init__(self, tracing: Tracing, rollout: Rollout, name: str) -> None:
        super().__init__(tracing, rollout)
        self._name = name

    def take(self, result: Traced) -> None:
        if isinstance(result, ToolResult):
            if result.failed:
                self.fail("tool_error")
            self.capture(lambda: {names.TOOL_RESULT: contents.tool_text(result.content)})

    def count(self, meters: Meters, seconds: float) -> None:
        meters.tool(seconds, self.rollout.agent, self._name, self.error)


class _DeliveryScope(_OperationScope):
    __slots__ = ()

    def take(self, result: Traced) -> None:
        if not isinstance(result, Sequence | ToolResult) and (error := made.delivery_error(result)):
            self.fail(error)
