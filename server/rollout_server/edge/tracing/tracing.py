"""The spans of rollouts: one trace from the caller's span over the rollout to its completions, tools and deliveries.

A span is open while the work is done, and is then the current one of its task, so that requests, programs and instrumented
libraries join the trace. The span of a rollout ends when its end is published.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import Final
from weakref import WeakKeyDictionary

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, StatusCode

from rollout_server.core.outcome import Failure
from rollout_server.core.record import Ended, ToolStarted
from rollout_server.core.spec import Target
from rollout_server.edge.tracing import attributes as made
from rollout_server.edge.tracing import contents
from rollout_server.edge.tracing import conventions as names
from rollout_server.edge.tracing.meters import Meters
from rollout_server.edge.tracing.propagation import remote_context
from rollout_server.runtime.errors import RolloutEnded, RolloutFailed
from rollout_server.runtime.log import Entry
from rollout_server.runtime.ports import CompletionRequest
from rollout_server.runtime.registry.dependencies import Attempt
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.run.tracer import OpenSpan, Traced
from rollout_server.runtime.tools.executor import ToolResult

_UID: Final = contexts.create_key("rollout uid")
_MOST_EVALUATIONS: Final = 64


@dataclass(frozen=True, slots=True)
class RolloutSpan:
    """The span of a rollout, and the context of everything in it."""

    span: Span
    context: Context
    trace_id: int


class Tracing:
    """Traces the rollouts of one server, and counts them: a `Tracer` and an `Observer`.

    Args:
        tracer, meter: of the SDK's providers. One of them may do nothing.
        captures: whether messages, arguments and results are exported.
    """

    def __init__(self, tracer: trace.Tracer, meters: Meters, *, captures: bool) -> None:
        self._tracer = tracer
        self.meters = meters
        self._captures = captures
        self._spans: WeakKeyDictionary[Rollout, RolloutSpan] = WeakKeyDictionary()
        self._open: dict[str, Rollout] = {}

    def rollout(self, rollout: Rollout) -> AbstractContextManager[object]:
        """See `Tracer`."""
        return _RolloutScope(self._begin(rollout).context, lambda: self._on_left(rollout))

    def completion(self, rollout: Rollout, request: CompletionRequest, target: Target, model: str = "") -> OpenSpan:
        """See `Tracer`."""
        given = made.completion_attributes(rollout, request, target, model)
        if self._captures:
            given[names.INPUT_MESSAGES] = contents.input_messages(request.messages[: request.asked.messages])
        name = f"{names.CHAT} {target.model}" if target.model else names.CHAT
        scope = self._scope(rollout, name, SpanKind.CLIENT, given)

        def report(result: Traced) -> None:
            if isinstance(result, Sequence):
                scope.add(made.completed_attributes(rollout, result))
                if self._captures:
                    scope.add({names.OUTPUT_MESSAGES: contents.output_messages(result)})

        scope.report, scope.count = report, self.meters.completion
        return scope

    def tool(self, rollout: Rollout, started: ToolStarted) -> OpenSpan:
        """See `Tracer`."""
        given = made.tool_attributes(rollout, started)
        if self._captures:
            given[names.TOOL_ARGUMENTS] = contents.tool_text(started.call.arguments)
        scope = self._scope(rollout, f"{names.EXECUTE_TOOL} {given[names.TOOL_NAME]}", SpanKind.INTERNAL, given)

        def report(result: Traced) -> None:
            if isinstance(result, ToolResult):
                if result.failed:
                    scope.fail({names.ERROR: "tool_error"})
                if self._captures:
                    scope.add({names.TOOL_RESULT: contents.tool_text(result.content)})

        scope.report = report
        scope.count = lambda seconds, shown: self.meters.tool(seconds, rollout, shown)
        return scope

    def delivery(self, rollout: Rollout, target: Target, attempt: int) -> OpenSpan:
        """See `Tracer`. The outcome of an earlier process has no span of a rollout here: its caller's is the parent."""
        given = made.delivery_attributes(rollout, target, attempt)
        scope = self._scope(rollout, names.DELIVER, SpanKind.CLIENT, given)

        def report(result: Traced) -> None:
            if not isinstance(result, Sequence | ToolResult) and (error := made.receipt_error(result)):
                scope.fail({names.ERROR: error})

        scope.report = report
        return scope

    def recorded(self, rollout: Rollout, entries: Sequence[Entry]) -> None:
        """End the span of a rollout with its outcome. One that never had a slot gets its span now."""
        ended, outcome = entries[-1].record, rollout.outcome
        if not isinstance(ended, Ended) or outcome is None:
            return
        self.meters.ended(rollout, ended)
        found = self._spans.get(rollout) if rollout.uid in self._open else self._begin(rollout, rollout.created)
        self._open.pop(rollout.uid, None)
        if found is None:
            return
        span = found.span
        if span.is_recording():
            span.set_attributes(made.outcome_attributes(outcome, ended))
            for evaluation in made.evaluations(outcome, _MOST_EVALUATIONS):
                span.add_event(names.EVALUATION, evaluation)
            if isinstance(outcome.end, Failure):
                span.set_status(StatusCode.ERROR)
        span.end(int(entries[-1].time * 1e9))

    def delivered(self, rollout: Rollout, attempt: Attempt, milliseconds: float) -> None:
        """Do nothing: each attempt has a span."""

    def close(self) -> None:
        """End the spans of rollouts that were suspended while they waited for their group."""
        for rollout in tuple(self._open.values()):
            self._suspend(rollout)

    def _begin(self, rollout: Rollout, created: float | None = None) -> RolloutSpan:
        parent = remote_context(rollout.traceparent)
        caller = trace.get_current_span(parent).get_span_context()
        links = []
        if rollout.had_to_wait and caller.is_valid:
            continued = rollout.is_restored and len(rollout.log.entries) > 1 and created is None
            links.append(Link(caller, {names.LINK: "resumed" if continued else "queued"}))
        span = self._tracer.start_span(
            f"{names.INVOKE_AGENT} {rollout.agent.name}",
            parent,
            SpanKind.INTERNAL,
            made.rollout_attributes(rollout),
            links,
            None if created is None else int(created * 1e9),
        )
        context = trace.set_span_in_context(span, contexts.set_value(_UID, rollout.uid, Context()))
        begun = RolloutSpan(span, context, span.get_span_context().trace_id)
        self._spans[rollout] = begun
        self._open[rollout.uid] = rollout
        return begun

    def _on_left(self, rollout: Rollout) -> None:
        if rollout.is_suspended and rollout.uid in self._open:
            self._suspend(rollout)

    def _suspend(self, rollout: Rollout) -> None:
        """End the span of a rollout that a later process continues."""
        del self._open[rollout.uid]
        found = self._spans.get(rollout)
        if found is not None:
            found.span.set_attribute(names.END, "suspended")
            found.span.end()

    def _scope(self, rollout: Rollout, name: str, kind: SpanKind, given: made.Attributes) -> SpanScope:
        parent = self._parent(rollout)
        span = self._tracer.start_span(name, parent, kind, given)
        return SpanScope(span, trace.set_span_in_context(span, parent), given)

    def _parent(self, rollout: Rollout) -> Context:
        """Return the context of a rollout's next span.

        It is the current one if that belongs to the rollout: of a tool that calls the model, or of a client that an agent's
        program has traced in the same trace.
        """
        found, current = self._spans.get(rollout), contexts.get_current()
        if found is None:
            return remote_context(rollout.traceparent)
        owner = contexts.get_value(_UID, current)
        if owner is None:
            same = trace.get_current_span(current).get_span_context().trace_id == found.trace_id
            return contexts.set_value(_UID, rollout.uid, current) if same else found.context
        return current if owner == rollout.uid else found.context


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


class SpanScope:
    """An open span with its attributes. `report` is called with the result, `count` with seconds and attributes at the end."""

    def __init__(self, span: Span, context: Context, given: made.Attributes) -> None:
        self._span = span
        self._context = context
        self._given = given
        self._added: made.Attributes = {}
        self.report: Callable[[Traced], None] = lambda result: None
        self.count: Callable[[float, made.Attributes], None] = lambda seconds, shown: None

    def add(self, attributes: made.Attributes) -> None:
        """Add attributes."""
        self._added |= attributes

    def fail(self, attributes: made.Attributes) -> None:
        """Mark the span as an error."""
        self._added |= attributes
        self._span.set_status(StatusCode.ERROR)

    def __enter__(self) -> Callable[[Traced], None]:
        self._token = contexts.attach(self._context)
        self._began = perf_counter()
        return self.report

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        seconds = perf_counter() - self._began
        contexts.detach(self._token)
        if error is not None:
            self._fail_with(error)
        if self._added:
            self._span.set_attributes(self._added)
        self._span.end()
        self.count(seconds, self._given | self._added)

    def _fail_with(self, error: BaseException) -> None:
        failure = error.failure if isinstance(error, RolloutFailed) else None
        if isinstance(error, RolloutEnded):
            if not isinstance(error.end, Failure):
                return
            failure = error.end
        if failure is not None:
            self.fail(made.failure_attributes(failure))
        else:
            cancelled = isinstance(error, asyncio.CancelledError)
            self.fail({names.ERROR: "cancelled" if cancelled else type(error).__name__})
