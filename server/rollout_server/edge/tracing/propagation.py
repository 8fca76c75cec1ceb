"""W3C Trace Context of the current span, for requests and programs, and the one that calls of this server bring."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from rollout_server.runtime.start_request import TraceContext

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

_PARENT: Final = "traceparent"
_STATE: Final = "tracestate"
_LONGEST_STATE: Final = 4096
_VALID: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def trace_of(metadata: Iterable[tuple[str, str | bytes]]) -> TraceContext:
    """Return the trace of a call by its metadata; an empty one if that is not valid. A too long `tracestate` is left out."""
    parent, states = "", []
    for name, value in metadata:
        if isinstance(value, str):
            if name == _PARENT and not parent:
                parent = value
            elif name == _STATE and value:
                states.append(value)
    if not _VALID.fullmatch(parent):
        return TraceContext()
    state = ",".join(states)
    return TraceContext(parent, state if len(state) <= _LONGEST_STATE else "")


def remote_context(given: TraceContext) -> Context:
    """Return the context of a caller's span; an empty one if the caller has none."""
    if not given.traceparent:
        return Context()
    return _PROPAGATOR.extract({_PARENT: given.traceparent, _STATE: given.tracestate}, Context())


def attach(given: TraceContext) -> None:
    """Let what follows in the current task belong to a trace. Nothing happens without one, and without an SDK."""
    if INSTALLED and given.traceparent and not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        contexts.attach(remote_context(given))


def is_dropped(span: Span) -> bool:
    """Return whether this process decided not to sample a span. Then nothing below it is sampled either."""
    if span.is_recording():
        return False
    context = span.get_span_context()
    return context.is_valid and not (context.is_remote or context.trace_flags.sampled)


def trace_headers() -> Mapping[str, str]:
    """Return the headers that let a request belong to the current span; none outside of a trace."""
    if not INSTALLED:
        return {}
    # Written here, because every request needs it: the API's propagator and the properties of a context take several times as long.
    trace_id, span_id, _, flags, state, is_valid = trace.get_current_span().get_span_context()
    if not is_valid:
        return {}
    headers = {_PARENT: f"00-{trace_id:032x}-{span_id:016x}-{flags:02x}"}
    return {**headers, _STATE: state.to_header()} if state else headers


def trace_environment() -> Mapping[str, str]:
    """Return the variables that let a program belong to the current span; none outside of a trace."""
    return {name.upper(): value for name, value in trace_headers().items()}


def add_event(name: str, attributes: Mapping[str, str | int | float]) -> None:
    """Add an event to the current span."""
    if INSTALLED:
        trace.get_current_span().add_event(name, attributes)
