"""The SDK of OpenTelemetry: finds the one of the process, and sets one up for `rollout serve` as the environment says.

The variables are OpenTelemetry's own (docs/tracing.md). Whatever is wrong with them, the server serves: the log says what is not
exported.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, cast
from weakref import WeakKeyDictionary

from rollout_server.edge.tracing.conventions import SCHEMA_URL, SCOPE
from rollout_server.edge.tracing.propagation import INSTALLED

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SynchronousMultiSpanProcessor
    from opentelemetry.sdk.trace import TracerProvider as SdkProvider
    from opentelemetry.trace import TracerProvider

    from rollout_server.edge.tracing.child_spans import ChildTracer
    from rollout_server.edge.tracing.histograms import Histograms
    from rollout_server.edge.tracing.tracing import Tracing

_log = logging.getLogger(__name__)
_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
_SIGNALS: Final = ("traces", "metrics")
_EXTRA: Final = "pip install 'rollout-server[otel]'"
_SERVICE: Final = "rollout-server"
_PROCESSORS: Final[WeakKeyDictionary[object, SynchronousMultiSpanProcessor]] = WeakKeyDictionary()
"""The processor of each provider that was set up here: what its spans are handed to when they end."""
_HISTOGRAMS: Final[WeakKeyDictionary[object, Histograms]] = WeakKeyDictionary()
"""The histograms of each provider that was set up here and does not need those of the SDK."""


def current_tracing(version: str = "") -> Tracing | None:
    """Return what traces and counts rollouts with the SDK of this process; None without one. `version` is that of this server."""
    if not INSTALLED:
        return None
    from opentelemetry import metrics, trace

    counts, records = _is_sdk(metrics.get_meter_provider()), _is_sdk(trace.get_tracer_provider())
    if not (counts or records):
        return None
    from rollout_server.edge.tracing.contents import captures_content
    from rollout_server.edge.tracing.meters import Meters
    from rollout_server.edge.tracing.tracing import Tracing

    provider = trace.get_tracer_provider()
    own = _own_tracer(provider, version)
    tracer = provider.get_tracer(SCOPE, version, SCHEMA_URL)
    histograms = _HISTOGRAMS.get(metrics.get_meter_provider())
    meters = Meters(metrics.get_meter(SCOPE, version, schema_url=SCHEMA_URL), histograms) if counts else None
    return Tracing(tracer, meters, own=own, records=records, captures=captures_content())


@contextmanager
def exporting() -> Iterator[None]:
    """Set up an SDK if the environment asks for one and the process has none. At the end, everything is exported."""
    wanted, own = _wanted(os.environ), list[object]()
    if wanted and not (INSTALLED and find_spec("opentelemetry.sdk")):
        text = "%s is set, but nothing is exported: OpenTelemetry is not installed; %s"
        _log.warning(text, next(iter(wanted.values())), _EXTRA)
    else:
        for signal in wanted:
            try:
                own.append(_SET_UP[signal]())
            except Exception as error:  # of the SDK, of an exporter, or of a variable
                _log.warning("%s are not exported: %s", signal, error)
    try:
        yield
    finally:
        if INSTALLED:
            _finish(own)


def _own_tracer(provider: TracerProvider, version: str) -> ChildTracer | None:
    """Return the tracer with cheap spans for a provider that was set up here; None if its own spans are needed."""
    processor = _PROCESSORS.get(provider)
    if processor is None:
        return None
    from rollout_server.edge.tracing.child_spans import child_tracer

    return child_tracer(cast("SdkProvider", provider), processor, (SCOPE, version, SCHEMA_URL))


def _wanted(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return the signals to export, and the variable that asks for each."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return {}
    wanted = {}
    for signal in _SIGNALS:
        exporter = f"OTEL_{signal.upper()}_EXPORTER"
        given = environment.get(exporter, "").strip()
        endpoints = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", _ENDPOINT)
        found = exporter if given else next((name for name in endpoints if environment.get(name)), "")
        if found and given != "none":
            wanted[signal] = found
    return wanted


def _set_up_traces() -> object:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import SynchronousMultiSpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    if _is_sdk(trace.get_tracer_provider()):
        return None
    processor = SynchronousMultiSpanProcessor()  # type: ignore[no-untyped-call]
    provider = TracerProvider(resource=_resource(), shutdown_on_exit=False, active_span_processor=processor)
    for exporter in _exporters("traces"):
        provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    _PROCESSORS[provider] = processor
    return provider


def _set_up_metrics() -> object:
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    if _is_sdk(metrics.get_meter_provider()):
        return None
    from rollout_server.edge.tracing.histograms import HistogramReader, Histograms, can_replace_those_of_the_sdk

    exporters, histograms = list(_exporters("metrics")), Histograms()
    cheap = can_replace_those_of_the_sdk(exporters)
    readers = [
        HistogramReader(each, histograms) if cheap else PeriodicExportingMetricReader(each) for each in exporters
    ]
    provider = MeterProvider(readers, _resource(), shutdown_on_exit=False)
    metrics.set_meter_provider(provider)
    if cheap:
        _HISTOGRAMS[provider] = histograms
    return provider


_SET_UP: Final[Mapping[str, Callable[[], object]]] = MappingProxyType(
    {"traces": _set_up_traces, "metrics": _set_up_metrics}
)


def _resource() -> Resource:
    """Return the resource that the environment describes; its service has a name in any case."""
    from opentelemetry.sdk.resources import Resource

    described = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return Resource.create(None if described else {"service.name": _SERVICE})


def _exporters(signal: str) -> Iterator[Any]:
    """Yield the exporters of a signal: those of OTEL_TRACES_EXPORTER or OTEL_METRICS_EXPORTER, by default OTLP over gRPC."""
    for name in (os.environ.get(f"OTEL_{signal.upper()}_EXPORTER") or "otlp").split(","):
        own = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL")
        protocol = own or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "grpc"
        entry = {"otlp": f"otlp_proto_{protocol.partition('/')[0]}"}.get(name.strip(), name.strip())
        found = next(iter(entry_points(group=f"opentelemetry_{signal}_exporter", name=entry)), None)
        if found is None:
            raise LookupError(
                f"no exporter {entry!r} is installed; rollout-server[otel] has otlp over gRPC, and console"
            )
        yield found.load()()


def _finish(own: Sequence[object]) -> None:
    """Export what is left, and stop the threads of the providers that were set up here. Others may go on."""
    from opentelemetry import metrics, trace

    for provider in (trace.get_tracer_provider(), metrics.get_meter_provider()):
        if _is_sdk(provider):
            try:
                (provider.shutdown if provider in own else provider.force_flush)()  # type: ignore[union-attr]
            except Exception as error:  # the collector is gone
                _log.warning("not everything was exported: %s", error)


def _is_sdk(provider: object) -> bool:
    """Return whether a provider does something: those of `opentelemetry-api` do not."""
    return not type(provider).__module__.startswith(("opentelemetry.trace", "opentelemetry.metrics"))
