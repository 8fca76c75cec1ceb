"""Spans of completions and tool calls at a fraction of the SDK's price, for the provider that this server has set up itself.

A span of the SDK cleans, copies and locks its attributes again and again. Those of this module clean only what others set, and the
same processors get them as they are. A span may be one of them if its parent is recorded in this process: it is sampled then, and
its flags and state are the parent's.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from time import time_ns
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from opentelemetry import trace
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.sampling import Sampler
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.util.types import Attributes, AttributeValue

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SynchronousMultiSpanProcessor, TracerProvider

_MOST: Final = 128
"""The SDK's default limit for attributes, events and links."""
_PLAIN: Final = frozenset({str, bool, int, float, tuple})
_NAMES: Final = frozenset({str})
_UNSET: Final = Status()
_DESCRIBED: Final = frozenset({"_name", "_kind", "_attributes"})
Describe: TypeAlias = Callable[[], tuple[str, SpanKind, dict[str, Any]]]


class ChildSpan(ReadableSpan, Span):
    """A span whose parent is recorded in this process. Processors get the span itself, which does not change after its end.

    It begins with its ids and its time only. The rest is made when somebody reads or sets it, which usually is after its end.

    Args:
        above: the ids of its parent.
        tracer: exports the span at its end.
        describe: returns name, kind and attributes, which need no cleaning; the span keeps this dict.
    """

    # What a span has until something sets it. The fields have the names that the SDK's methods and properties read.
    _instrumentation_info = None
    _parent: SpanContext
    _attributes: dict[str, Any]
    _end_time: int | None = None
    _events: Sequence[Event] = ()
    _links: Sequence[Link] = ()
    _status = _UNSET

    def __init__(self, above: SpanContext, tracer: ChildTracer, describe: Describe) -> None:
        self._parent = above
        self._id = tracer.new_id()
        self._start_time = time_ns()
        self._tracer = tracer
        self._resource = tracer.resource
        self._instrumentation_scope = tracer.scope
        self._describe: Describe | None = describe

    def __getattr__(self, field: str) -> Any:
        """Make a field that is read for the first time."""
        if field == "_context":
            above = self._parent
            self._context = SpanContext(above.trace_id, self._id, False, above.trace_flags, above.trace_state)
        elif field in _DESCRIBED and self._describe is not None:
            self._name, self._kind, self._attributes = self._describe()
            self._describe = None
        else:
            raise AttributeError(f"{type(self).__name__} has no attribute {field!r}")
        return self.__dict__[field]

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
            _set(self._attributes, attributes)

    def add(self, attributes: Mapping[str, Any]) -> None:
        """Set attributes that need no cleaning, while it is open."""
        self._attributes.update(attributes)

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
        if self._end_time is None and self._name != name:  # a name that is not read first would be made later
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


class ChildTracer:
    """Starts the cheap spans of a provider.

    Args:
        provider: the provider.
        export: is called with each span that has ended.
        scope: name, version and schema of the instrumented library.
    """

    def __init__(
        self, provider: TracerProvider, export: Callable[[ReadableSpan], None], scope: tuple[str, str, str]
    ) -> None:
        self.resource = provider.resource
        self.scope = InstrumentationScope(*scope)
        self.export = export
        self.new_id = provider.id_generator.generate_span_id

    def start(self, above: Span, describe: Describe) -> ChildSpan:
        """Start a span below one that is recorded. See `ChildSpan`."""
        return ChildSpan(above.get_span_context(), self, describe)


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
    """Return whether exporters see what a span has: the fields for it have no public names."""
    above, ended = trace.SpanContext(1, 2, is_remote=False), list[ReadableSpan]()
    tracer = ChildTracer(provider, ended.append, scope)
    try:
        span = tracer.start(trace.NonRecordingSpan(above), lambda: ("", SpanKind.CLIENT, {}))
        span.update_name("name")
        span.set_attribute("key", 1)
        span.add_event("event")
        span.add_link(above)
        span.set_status(StatusCode.ERROR)
        span.end(2)
        (one,) = ended
        set_later = (one.name, one.attributes, len(one.events), len(one.links), one.status.status_code, one.end_time)
        from_start = (one.kind, one.parent, one.context.trace_id, one.resource, one.instrumentation_scope)
        begun = one.start_time is not None
    except (AttributeError, TypeError):
        return False
    return begun and (*set_later, *from_start) == (
        *("name", {"key": 1}, 1, 1, StatusCode.ERROR, 2),
        *(SpanKind.CLIENT, above, 1, tracer.resource, tracer.scope),
    )


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
