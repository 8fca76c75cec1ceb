"""The SDK of OpenTelemetry with exporters in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry import metrics, trace
from opentelemetry.metrics import _internal as metrics_api
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.trace import SynchronousMultiSpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.util._once import Once
from rollout_server.edge.tracing import sdk
from rollout_server.edge.tracing.histograms import HistogramReader, Histograms

from tests.edge.tracing.stage import Exported, LastMetrics


@pytest.fixture
def no_sdk() -> Iterator[None]:
    """The providers of the process are those of the API. It allows to set them once, which tests undo."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((trace, "_TRACER_PROVIDER"), (metrics_api, "_METER_PROVIDER")):
            patch.setattr(module, name, None)
            patch.setattr(module, f"{name}_SET_ONCE", Once())
        yield


@pytest.fixture(params=["of the process", "of the server"])
def exported(no_sdk: None, request: pytest.FixtureRequest) -> Iterator[Exported]:
    """An SDK whose exporters are read: one that the process has, or one as the server sets up."""
    exporter, metrics_exporter, histograms = InMemorySpanExporter(), LastMetrics(), Histograms()
    processor = SynchronousMultiSpanProcessor()
    provider = TracerProvider(shutdown_on_exit=False, active_span_processor=processor)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    own = request.param == "of the server"
    reader = HistogramReader(metrics_exporter, histograms) if own else PeriodicExportingMetricReader(metrics_exporter)
    meters = MeterProvider([reader], shutdown_on_exit=False)
    metrics.set_meter_provider(meters)
    if own:
        sdk._PROCESSORS[provider] = processor
        sdk._HISTOGRAMS[meters] = histograms
    yield Exported(exporter, meters, metrics_exporter)
    meters.shutdown()
