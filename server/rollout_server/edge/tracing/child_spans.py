"""Spans of completions and tool calls at a fraction of the SDK's price, for the provider that this server has set up itself.

A span of the SDK cleans, copies and locks its attributes again and again: two of them take 3 to 9 % of the CPU of a turn. Those of
this module clean only what others set, and pass the same `ReadableSpan` to the same processors. A span is one of them if its
parent is recorded in this process: it is sampled then, and its flags and state are the parent's. Below a span that this process
did not sample there is no new one: the parent stands for it. All others are the SDK's.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from time import time_ns
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from opentelemetry import trace
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.context import Context
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.sampling import Sampler
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.util.types import Attributes, AttributeValue

from rollout_server.edge.tracing.propagation import is_dropped

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SynchronousMultiSpanProcessor, TracerProvider

_MOST: Final = 128
"""The SDK's default limit for attributes, events and links."""
_PLAIN: Final = frozenset({str, bool, int, float, tuple})
_NAMES: Final = frozenset({str})
_UNSET: Final = Status()
_Export: TypeAlias = "Callable[[ChildSpan, int], None]"


class ChildSpan(Span):
    """An open span whose parent is recorded in this process.

    Args:
        name: of the span.
        ids: its own and those of its parent.
        kind: of the span.
        started: Unix time in ns; None: now.
        attributes: which need no cleaning; the span keeps this dict.
        export: is called with the span and the time of its end.
    """

    __slots__ = ("_export", "attributes", "context", "events", "kind", "links", "name", "parent", "started", "status")

    def __init__(
        self,
        name: str,
        ids: tuple[SpanContext, SpanContext],
        kind: SpanKind,
        started: int | None,
        attributes: dict[str, Any],
        export: _Export,
    ) -> None:
        self.name = name
        self.context, self.parent = ids
        self.kind = kind
        self.started = started or time_ns()
        self.attributes = attributes
        self.events: Sequence[Event] = ()
        self.links: Sequence[Link] = ()
        self.status = _UNSET
        self._export: _Export | None = export

    def get_span_context(self) -> SpanContext:
        """Return its ids."""
        return self.context

    def is_recording(self) -> bool:
        """Return whether it is open."""
        return self._export is not None

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        """Set an attribute. What is none is converted or left out, as the SDK does."""
        self.set_attributes({key: value})

    def set_attributes(self, attributes: Any) -> None:
        """Set attributes. What is none is converted or left out, as the SDK does."""
        if self._export is not None:
            _set(self.attributes, attributes)

    def add_event(self, name: str, attributes: Attributes = None, timestamp: int | None = None) -> None:
        """Add an event."""
        if self._export is not None and len(self.events) < _MOST:
            self.events = (*self.events, Event(name, BoundedAttributes(_MOST, attributes), timestamp))

    def add_link(self, context: SpanContext, attributes: Attributes = None) -> None:
        """Add a link to another span."""
        if self._export is not None and len(self.links) < _MOST:
            self.links = (*self.links, Link(context, BoundedAttributes(_MOST, attributes)))

    def update_name(self, name: str) -> None:
        """Change the name."""
        if self._export is not None:
            self.name = name

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        """Set the status. OK is final, and UNSET changes nothing."""
        new = status if isinstance(status, Status) else Status(status, description)
        if self._export is not None and not new.is_unset and self.status.status_code is not StatusCode.OK:
            self.status = new

    def record_exception(
        self,
        exception: BaseException,
        attributes: Attributes = None,
        timestamp: int | None = None,
        escaped: bool = False,
    ) -> None:
        """Add an exception as an event, with the attributes of the semantic conventions."""
        module, name = type(exception).__module__, type(exception).__qualname__
        found = {
            "exception.type": name if module == "builtins" else f"{module}.{name}",
            "exception.message": str(exception),
            "exception.stacktrace": "".join(traceback.format_exception(exception)),
            "exception.escaped": str(escaped),
        }
        self.add_event("exception", {**found, **(attributes or {})}, timestamp)

    def end(self, end_time: int | None = None) -> None:
        """End the span and export it. It does not change after that."""
        export, self._export = self._export, None
        if export is not None:
            export(self, end_time or time_ns())


class ChildTracer(trace.Tracer):
    """Starts spans of a provider whose only processor is `processor`: cheap ones where possible, otherwise those of its own tracer.

    Args:
        provider: the provider.
        processor: receives the spans that have ended.
        scope: name, version and schema of the instrumented library.
    """

    def __init__(
        self, provider: TracerProvider, processor: SynchronousMultiSpanProcessor, scope: tuple[str, str, str]
    ) -> None:
        self._provider = provider
        self._processor = processor
        self._tracer = provider.get_tracer(*scope)
        self._scope = InstrumentationScope(*scope)

    def start_span(
        self,
        name: str,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        start_time: int | None = None,
        *further: bool,
        **named: bool,
    ) -> Span:
        """Start a span."""
        above = trace.get_current_span(context)
        if not above.is_recording() or links:
            if is_dropped(above):
                return above
            return self._tracer.start_span(name, context, kind, attributes, links, start_time, *further, **named)
        span = self.start_below(above, name, kind, {}, start_time)
        if attributes:
            _set(span.attributes, attributes)
        return span

    def start_below(
        self, above: Span, name: str, kind: SpanKind, attributes: dict[str, Any], start_time: int | None = None
    ) -> ChildSpan:
        """Start a span below one that is recorded, with attributes that need no cleaning. The span keeps this dict."""
        parent = above.get_span_context()
        span_id = self._provider.id_generator.generate_span_id()
        ids = SpanContext(parent.trace_id, span_id, False, parent.trace_flags, parent.trace_state)
        return ChildSpan(name, (ids, parent), kind, start_time, attributes, self.finish)

    def start_as_current_span(self, *given: Any, **named: Any) -> Any:
        """Start a span of the SDK and make it the current one."""
        return self._tracer.start_as_current_span(*given, **named)

    def finish(self, span: ChildSpan, ended: int) -> None:
        """Export a span that ended at this time."""
        self._processor.on_end(self.readable(span, ended))

    def readable(self, span: ChildSpan, ended: int) -> ReadableSpan:
        """Return what exporters read of a span that ended at this time. Raises TypeError if the SDK has other parts."""
        return ReadableSpan(
            name=span.name,
            context=span.context,
            parent=span.parent,
            resource=self._provider.resource,
            attributes=span.attributes,
            events=span.events,
            links=span.links,
            kind=span.kind,
            status=span.status,
            start_time=span.started,
            end_time=ended,
            instrumentation_scope=self._scope,
        )


def child_tracer(
    provider: TracerProvider, processor: SynchronousMultiSpanProcessor, scope: tuple[str, str, str]
) -> ChildTracer | None:
    """Return a `ChildTracer`; None where its spans could differ from the SDK's.

    They could if the environment limits spans, if a sampler decides about each span, or if this version of the SDK does not accept
    spans that are made of their parts: its documentation says that they are usually its own.
    """
    limited = any(name.startswith("OTEL_") and name.endswith("_LIMIT") for name in os.environ)
    if limited or type(provider.sampler).__module__ != Sampler.__module__:
        return None
    tracer = ChildTracer(provider, processor, scope)
    none = trace.INVALID_SPAN_CONTEXT
    try:
        tracer.readable(ChildSpan("", (none, none), SpanKind.INTERNAL, None, {}, tracer.finish), 0)
    except TypeError:
        return None
    return tracer


def _set(attributes: dict[str, Any], given: Any) -> None:
    kinds = {*map(type, given.values())}
    few = len(attributes) + len(given) <= _MOST and _NAMES.issuperset(map(type, given)) and "" not in given
    if few and _PLAIN.issuperset(kinds) and (tuple not in kinds or all(map(_is_plain, given.values()))):
        attributes.update(given)
        return
    for key, value in given.items():
        if len(attributes) >= _MOST and key not in attributes:
            return
        if type(key) is str and key and type(value) in _PLAIN and _is_plain(value):
            attributes[key] = value
        else:
            attributes.update(BoundedAttributes(None, {key: value}))


def _is_plain(value: Any) -> bool:
    """Return whether a value of `_PLAIN`'s types needs no cleaning: a tuple may hold anything."""
    return type(value) is not tuple or all(type(one) is str for one in value)
