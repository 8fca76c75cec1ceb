"""The SDK of OpenTelemetry with exporters in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from opentelemetry import metrics, trace
from opentelemetry.metrics import _internal as metrics_api
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.trace import SynchronousMultiSpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, DEFAULT_ON, Sampler
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


@contextmanager
def set_up(*, own: bool, sampler: Sampler | None = DEFAULT_ON) -> Iterator[Exported]:
    """An SDK whose exporters are read. `own`: as the server sets it up. `sampler`: None for metrics only."""
    exporter, metrics_exporter, histograms = InMemorySpanExporter(), LastMetrics(), Histograms()
    if sampler is not None:
        processor = SynchronousMultiSpanProcessor()
        provider = TracerProvider(sampler, shutdown_on_exit=False, active_span_processor=processor)
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        trace.set_tracer_provider(provider)
        if own:
            sdk._PROCESSORS[provider] = processor
    reader = HistogramReader(metrics_exporter, histograms) if own else PeriodicExportingMetricReader(metrics_exporter)
    meters = MeterProvider([reader], shutdown_on_exit=False)
    metrics.set_meter_provider(meters)
    if own:
        sdk._HISTOGRAMS[meters] = histograms
    yield Exported(exporter, meters, metrics_exporter)
    meters.shutdown()


@pytest.fixture(params=["of the process", "of the server"])
def exported(no_sdk: None, request: pytest.FixtureRequest) -> Iterator[Exported]:
    """An SDK whose exporters are read: one that the process has, or one as the server sets up."""
    with set_up(own=request.param == "of the server") as found:
        yield found


@pytest.fixture(params=[None, ALWAYS_OFF], ids=["no traces", "not sampled"])
def exported_without_spans(no_sdk: None, request: pytest.FixtureRequest) -> Iterator[Exported]:
    """An SDK as the server sets it up, with metrics only, or with a sampler that drops all rollouts."""
    with set_up(own=True, sampler=request.param) as found:
        yield found
