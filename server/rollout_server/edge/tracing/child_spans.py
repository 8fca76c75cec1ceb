"""Spans of completions and tool calls at a fraction of the SDK's price, for the provider that this server has set up itself.

A span of the SDK cleans, copies and locks its attributes again and again. Those of this module clean only what others set, and the
same processors get them as they are. A span is one of them if its parent is recorded in this process: it is sampled then, and its
flags and state are the parent's. Below a span that this process did not sample there is no new one: the parent stands for it. All
others are the SDK's.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from time import time_ns
from typing import TYPE_CHECKING, Any, Final, cast

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


class ChildSpan(ReadableSpan, Span):
    """A span whose parent is recorded in this process. Processors get the span itself, which does not change after its end.

    Args:
        name: of the span.
        ids: its own and those of its parent.
        kind: of the span.
        started: Unix time in ns; None: now.
        attributes: which need no cleaning; the span keeps this dict.
        tracer: exports the span at its end.
    """

    def __init__(
        self,
        name: str,
        ids: tuple[SpanContext, SpanContext],
        kind: SpanKind,
        started: int | None,
        attributes: dict[str, Any],
        tracer: ChildTracer,
    ) -> None:
        super().__init__(
            name,
            *ids,
            resource=tracer.resource,
            attributes=attributes,
            kind=kind,
            status=_UNSET,
            start_time=started or time_ns(),
            instrumentation_scope=tracer.scope,
        )
        self.kept = attributes
        self._tracer = tracer

    def get_span_context(self) -> SpanContext:
        """Return its ids."""
        return cast("SpanContext", self._context)

    def is_recording(self) -> bool:
        """Return whether it is open."""
        return self._end_time is None

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        """Set an attribute. What is none is converted or left out, as the SDK does."""
        self.set_attributes({key: value})

    def set_attributes(self, attributes: Any) -> None:
        """Set attributes. What is none is converted or left out, as the SDK does."""
        if self._end_time is None:
            _set(self.kept, attributes)

    def add_event(self, name: str, attributes: Attributes = None, timestamp: int | None = None) -> None:
        """Add an event."""
        if self._end_time is None and len(self._events) < _MOST:
            self._events = (*self._events, Event(name, BoundedAttributes(_MOST, attributes), timestamp))

    def add_link(self, context: SpanContext, attributes: Attributes = None) -> None:
        """Add a link to another span."""
        if self._end_time is None and len(self._links) < _MOST:
            self._links = (*self._links, Link(context, BoundedAttributes(_MOST, attributes)))

    def update_name(self, name: str) -> None:
        """Change the name."""
        if self._end_time is None:
            self._name = name

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        """Set the status. OK is final, and UNSET changes nothing."""
        new = status if isinstance(status, Status) else Status(status, description)
        if self._end_time is None and not new.is_unset and self._status.status_code is not StatusCode.OK:
            self._status = new

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
        """End the span and export it."""
        if self._end_time is None:
            self._end_time = end_time or time_ns()
            self._tracer.export(self)


class ChildTracer(trace.Tracer):
    """Starts spans of a provider: cheap ones where possible, otherwise those of its own tracer.

    Args:
        provider: the provider.
        export: is called with each cheap span that has ended.
        scope: name, version and schema of the instrumented library.
    """

    def __init__(
        self, provider: TracerProvider, export: Callable[[ReadableSpan], None], scope: tuple[str, str, str]
    ) -> None:
        self.resource = provider.resource
        self.scope = InstrumentationScope(*scope)
        self.export = export
        self._new_id = provider.id_generator.generate_span_id
        self._tracer = provider.get_tracer(*scope)

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
            _set(span.kept, attributes)
        return span

    def start_below(
        self, above: Span, name: str, kind: SpanKind, attributes: dict[str, Any], start_time: int | None = None
    ) -> ChildSpan:
        """Start a span below one that is recorded, with attributes that need no cleaning. The span keeps this dict."""
        parent = above.get_span_context()
        ids = SpanContext(parent.trace_id, self._new_id(), False, parent.trace_flags, parent.trace_state)
        return ChildSpan(name, (ids, parent), kind, start_time, attributes, self)

    def start_as_current_span(self, *given: Any, **named: Any) -> Any:
        """Start a span of the SDK and make it the current one."""
        return self._tracer.start_as_current_span(*given, **named)


def child_tracer(
    provider: TracerProvider, processor: SynchronousMultiSpanProcessor, scope: tuple[str, str, str]
) -> ChildTracer | None:
    """Return a `ChildTracer`; None where its spans could differ from the SDK's.

    They could if the environment limits spans, if a sampler decides about each span, or if exporters would not see what they set
    with this version of the SDK: its documentation says that spans are usually its own. `processor` is that of `provider`.
    """
    limited = any(name.startswith("OTEL_") and name.endswith("_LIMIT") for name in os.environ)
    if limited or type(provider.sampler).__module__ != Sampler.__module__ or not _are_shown(provider, scope):
        return None
    return ChildTracer(provider, processor.on_end, scope)


def _are_shown(provider: TracerProvider, scope: tuple[str, str, str]) -> bool:
    """Return whether exporters see what a span sets: the fields for it have no public names."""
    ids, ended = (trace.INVALID_SPAN_CONTEXT, trace.INVALID_SPAN_CONTEXT), list[ReadableSpan]()
    try:
        span = ChildSpan("", ids, SpanKind.CLIENT, 1, {}, ChildTracer(provider, ended.append, scope))
        span.update_name("name")
        span.set_attribute("key", 1)
        span.add_event("event")
        span.add_link(ids[0])
        span.set_status(StatusCode.ERROR)
        span.end(2)
        (one,) = ended
        shown = (one.name, one.attributes, len(one.events), len(one.links), one.status.status_code)
        times = (one.start_time, one.end_time)
    except (AttributeError, TypeError):
        return False
    return (*shown, *times) == ("name", {"key": 1}, 1, 1, StatusCode.ERROR, 1, 2)


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
