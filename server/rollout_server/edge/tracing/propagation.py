"""W3C Trace Context of the current span, for requests and programs, and the one that calls of this server bring."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

try:
    from opentelemetry import context as contexts
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.trace import Span
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:  # also if only other parts of the namespace package are left
    INSTALLED = False
else:
    INSTALLED = True
    _PROPAGATOR: Final = TraceContextTextMapPropagator()

_HEADER: Final = "traceparent"
_VALID: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def traceparent_of(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Return the `traceparent` of a call's metadata; empty if there is none that is valid."""
    found = next((value for name, value in metadata if name == _HEADER), "")
    return found if isinstance(found, str) and _VALID.fullmatch(found) else ""


def remote_context(traceparent: str) -> Context:
    """Return the context of a caller's span; an empty one if the caller has none."""
    return _PROPAGATOR.extract({_HEADER: traceparent}, Context()) if traceparent else Context()


def attach(traceparent: str) -> None:
    """Let what follows in the current task belong to a trace. Nothing happens without one, and without an SDK."""
    if INSTALLED and traceparent and not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        contexts.attach(remote_context(traceparent))


def is_dropped(span: Span) -> bool:
    """Return whether this process decided not to sample a span. Then nothing below it is sampled either."""
    context = span.get_span_context()
    return context.is_valid and not (context.is_remote or context.trace_flags.sampled)


def trace_headers() -> Mapping[str, str]:
    """Return the headers that let a request belong to the current span; none outside of a trace."""
    if not INSTALLED:
        return {}
    span = trace.get_current_span().get_span_context()
    if not span.is_valid:
        return {}
    # Written here, because every request needs it: the API's propagator takes several times as long.
    headers = {_HEADER: f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"}
    return {**headers, "tracestate": span.trace_state.to_header()} if span.trace_state else headers


def trace_environment() -> Mapping[str, str]:
    """Return the variables that let a program belong to the current span; none outside of a trace."""
    return {name.upper(): value for name, value in trace_headers().items()}


def add_event(name: str, attributes: Mapping[str, str | int | float]) -> None:
    """Add an event to the current span."""
    if INSTALLED:
        trace.get_current_span().add_event(name, attributes)
