"""The SDK of OpenTelemetry with exporters in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry import metrics, trace
from opentelemetry.metrics import _internal as metrics_api
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import SynchronousMultiSpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.util._once import Once
from rollout_server.edge.tracing import sdk

from tests.edge.tracing.stage import Exported


@pytest.fixture
def no_sdk() -> Iterator[None]:
    """The providers of the process are those of the API. It allows to set them once, which tests undo."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((trace, "_TRACER_PROVIDER"), (metrics_api, "_METER_PROVIDER")):
            patch.setattr(module, name, None)
            patch.setattr(module, f"{name}_SET_ONCE", Once())
        yield


@pytest.fixture(params=["of the process", "of the server"])
def exported(no_sdk: None, request: pytest.FixtureRequest) -> Exported:
    """An SDK whose exporters are read: one that the process has, or one as the server sets up."""
    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    processor = SynchronousMultiSpanProcessor()
    provider = TracerProvider(shutdown_on_exit=False, active_span_processor=processor)
    if request.param == "of the server":
        sdk._PROCESSORS[provider] = processor
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    metrics.set_meter_provider(MeterProvider([reader], shutdown_on_exit=False))
    return Exported(exporter, reader)
