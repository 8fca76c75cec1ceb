"""The spans of rollouts: one trace from the caller's span over the rollout to its completions, tools and deliveries.

A span is open while the work is done, and is then the current one of its task, so that requests, programs and instrumented
libraries join the trace. The span of a rollout ends when its end is published.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
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
from rollout_server.edge.tracing import conventions as names
from rollout_server.edge.tracing.meters import Meters
from rollout_server.edge.tracing.operations import (
    EndedOperations,
    Guard,
    TracedCompletion,
    TracedDelivery,
    TracedOperation,
    TracedToolCall,
)
from rollout_server.edge.tracing.propagation import is_dropped, remote_context
from rollout_server.runtime.log import Entry
from rollout_server.runtime.ports import CompletionRequest
from rollout_server.runtime.registry.dependencies import Attempt
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.run.tracer import UNTRACED, OpenSpan

if TYPE_CHECKING:
    from rollout_server.edge.tracing.child_spans import ChildTracer

_UID: Final = contexts.create_key("rollout uid")
_MOST_EVALUATIONS: Final = 64
_Parent: TypeAlias = tuple[Context, Span]
"""The context in which a span begins, and the span that is current there."""


@dataclass(frozen=True, slots=True)
class RolloutSpan:
    """The span of a rollout, the context of everything in it, and whether spans below it are not exported."""

    span: Span
    context: Context
    is_needless: bool


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
        self._own = own
        self._records = records
        self._guard = Guard()
        self._ended = EndedOperations(meters, self._guard, captures=captures)
        self._spans: WeakKeyDictionary[Rollout, RolloutSpan] = WeakKeyDictionary()
        self._open: dict[str, Rollout] = {}

    def rollout(self, rollout: Rollout) -> AbstractContextManager[object]:
        """See `Tracer`."""
        return _RolloutScope(self._begin(rollout).context, lambda: self._on_left(rollout))

    def completion(self, rollout: Rollout, request: CompletionRequest, target: Target, model: str = "") -> OpenSpan:
        """See `Tracer`."""
        return self._opened(TracedCompletion(rollout, self._ended, request, target, model))

    def tool(self, rollout: Rollout, started: ToolStarted) -> OpenSpan:
        """See `Tracer`."""
        return self._opened(TracedToolCall(rollout, self._ended, started))

    def delivery(self, rollout: Rollout, target: Target, attempt: int) -> OpenSpan:
        """See `Tracer`. The outcome of an earlier process has no span of a rollout here: its caller's is the parent."""
        return self._opened(TracedDelivery(rollout, self._ended, target, attempt))

    def recorded(self, rollout: Rollout, entries: Sequence[Entry]) -> None:
        """End the span of a rollout with its outcome. One that never had a slot gets its span now."""
        ended = entries[-1].record
        if not isinstance(ended, Ended) or (outcome := rollout.outcome) is None:
            return
        self._ended.write()
        if self.meters is not None:
            with self._guard:
                self.meters.ended(rollout, ended)
        found = self._spans.get(rollout) if rollout.uid in self._open else self._begin(rollout, rollout.created)
        self._open.pop(rollout.uid, None)
        if found is None:
            return
        span = found.span
        with self._guard:
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
        """Write what has ended, and end the spans of rollouts that were suspended while they waited for their group."""
        self._ended.write()
        for rollout in tuple(self._open.values()):
            self._suspend(rollout)

    def _opened(self, operation: TracedOperation) -> OpenSpan:
        """Give an operation its span, if it needs one."""
        parent = self._next_parent(operation.rollout)
        if parent is None:
            return UNTRACED if self.meters is None else operation
        context, above = parent
        if self._own is not None and above.is_recording():
            operation.open(self._own.start(above, operation.describe), context)
        elif self._own is not None and is_dropped(above):
            operation.open(above, context)
        else:
            operation.open(self._start(parent, *operation.describe()), context)
        return operation

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
        span = self._start((parent, above), name, SpanKind.INTERNAL, given, links, time)
        context = trace.set_span_in_context(span, contexts.set_value(_UID, rollout.uid, Context()))
        begun = RolloutSpan(span, context, self._is_needless(span))
        self._spans[rollout] = begun
        self._open[rollout.uid] = rollout
        return begun

    def _start(
        self, parent: _Parent, name: str, kind: SpanKind, attributes: made.Attributes, *links_and_time: Any
    ) -> Span:
        """Start a span of the SDK. If that raises, what would be below the span is below its parent."""
        context, above = parent
        try:
            return self.tracer.start_span(name, context, kind, attributes, *links_and_time)
        except Exception as error:
            self._guard.log(error)
        return NonRecordingSpan(above.get_span_context())

    def _end(self, rollout: Rollout, ended: RolloutSpan, time: int | None = None) -> None:
        """End the span of a rollout, of which only the ids are kept: it may be retained for long."""
        with self._guard:
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
        found = self._spans.get(rollout)
        if found is not None and current is found.context:  # nearly always
            return None if found.is_needless else (current, found.span)
        above, owner = trace.get_current_span(current), current.get(_UID)
        if owner == rollout.uid:
            return None if self._is_needless(above) else (current, above)
        if found is None:
            context = remote_context(rollout.trace)
        elif owner is None and above.get_span_context().trace_id == found.span.get_span_context().trace_id:
            return contexts.set_value(_UID, rollout.uid, current), above
        else:
            context = found.context
        return context, trace.get_current_span(context)

    def _is_needless(self, above: Span) -> bool:
        """Return whether nothing below a span is exported."""
        return is_dropped(above) if self._own is not None else not self._records


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
