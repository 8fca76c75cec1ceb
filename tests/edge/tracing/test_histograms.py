"""Histograms that are not the SDK's own export the same."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import Histogram, MeterProvider
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    ConsoleMetricExporter,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, ExponentialBucketHistogramAggregation
from rollout_server.core.spec import Dialect, Target
from rollout_server.edge.tracing import conventions as names
from rollout_server.edge.tracing.histograms import HistogramReader, Histograms, can_replace_those_of_the_sdk
from rollout_server.edge.tracing.meters import Meters

from tests.edge.tracing.stage import LastMetrics

MODELS = st.sampled_from([("", None), ("a", None), ("b", "network")])
SECONDS = st.one_of(st.floats(0, 1e6), st.sampled_from(names.DURATION_BUCKETS))


class Idle:
    """A registry without rollouts."""

    running = queued = 0


@contextmanager
def exporting(histograms: Histograms | None) -> Iterator[tuple[Meters, LastMetrics, MeterProvider]]:
    exporter = LastMetrics()
    reader = PeriodicExportingMetricReader(exporter) if histograms is None else HistogramReader(exporter, histograms)
    provider = MeterProvider([reader], shutdown_on_exit=False)
    meters = Meters(provider.get_meter(names.SCOPE, "1", names.SCHEMA_URL), histograms)
    meters.watch(Idle())
    try:
        yield meters, exporter, provider
    finally:
        provider.shutdown()


def shown(data: MetricsData | None) -> Mapping[str, Any]:
    """What is exported, without times and exemplars."""
    assert data is not None
    found = json.loads(data.to_json())
    [scope] = found["resource_metrics"][0]["scope_metrics"]
    for metric in scope["metrics"]:
        for point in metric["data"]["data_points"]:
            assert 0 < (point.pop("start_time_unix_nano") or 1) <= point.pop("time_unix_nano")
            point["exemplars"] = []
            if "sum" in point:  # the SDK adds up in another order
                point["sum"] = float(f"{point['sum']:.6g}")
        metric["data"]["data_points"].sort(key=lambda point: str(point["attributes"]))
    scope["metrics"].sort(key=lambda metric: metric["name"])
    return {name: scope[name] for name in ("metrics", "schema_url", "scope")}


def engine(model: str) -> Target:
    return Target("http://engine:8000/v1", Dialect.OPENAI, model=model)


@given(st.lists(st.tuples(SECONDS, MODELS, st.one_of(st.none(), st.integers(0, 10**8))), max_size=20))
def test_they_equal_those_of_the_sdk(values: list[tuple[float, tuple[str, str | None], int | None]]) -> None:
    found = []
    for histograms in (None, Histograms()):
        with exporting(histograms) as (meters, exporter, provider):
            for number, (seconds, (model, error), tokens) in enumerate(values):
                meters.completion(seconds, engine(model), None if tokens is None else (tokens, number), error)
                if number in {5, 12}:
                    provider.force_flush()  # they are cumulative
        found.append(shown(exporter.data))
    theirs, ours = found
    assert ours == theirs


def test_too_many_sets_of_attributes_are_counted_together() -> None:
    found = []
    for histograms in (None, Histograms()):
        with exporting(histograms) as (meters, exporter, _):
            for number in range(2100):
                meters.completion(1, engine(f"m{number}"), None, None)
        [metric] = [each for each in shown(exporter.data)["metrics"] if each["name"] == names.OPERATION_DURATION]
        found.append(metric["data"]["data_points"])
    theirs, ours = found
    assert ours == theirs


def test_no_value_of_several_threads_is_lost() -> None:
    """Some are put into their buckets while others are added."""
    histogram = Histograms().create_histogram("h", unit="s", description="", explicit_bucket_boundaries_advisory=[1, 2])
    record = histogram.recorder({"a": 1})
    with ThreadPoolExecutor(4) as threads:
        for _ in range(4):
            threads.submit(lambda: [record(number % 4) for number in range(20_000)])
        while histogram.metric(0) is None:
            pass
        for _ in range(20):
            histogram.metric(0)
    metric = histogram.metric(7)
    assert metric is not None
    [point] = metric.data.data_points
    assert (point.count, point.sum, point.min, point.max) == (80_000, 120_000, 0, 3)
    assert (point.bucket_counts, point.time_unix_nano) == ((40_000, 20_000, 20_000), 7)


def delta(_: pytest.MonkeyPatch) -> ConsoleMetricExporter:
    return ConsoleMetricExporter(preferred_temporality={Histogram: AggregationTemporality.DELTA})


def exponential(_: pytest.MonkeyPatch) -> ConsoleMetricExporter:
    return ConsoleMetricExporter(preferred_aggregation={Histogram: ExponentialBucketHistogramAggregation()})


def own_buckets(_: pytest.MonkeyPatch) -> ConsoleMetricExporter:
    return ConsoleMetricExporter(preferred_aggregation={Histogram: ExplicitBucketHistogramAggregation([1, 2])})


def otlp(_: pytest.MonkeyPatch) -> OTLPMetricExporter:
    return OTLPMetricExporter(endpoint="127.0.0.1:9", insecure=True)


def otlp_delta(patch: pytest.MonkeyPatch) -> OTLPMetricExporter:
    patch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "DELTA")
    return otlp(patch)


def otlp_exponential(patch: pytest.MonkeyPatch) -> OTLPMetricExporter:
    patch.setenv("OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION", "base2_exponential_bucket_histogram")
    return otlp(patch)


def exemplars(patch: pytest.MonkeyPatch) -> ConsoleMetricExporter:
    patch.setenv("OTEL_METRICS_EXEMPLAR_FILTER", "trace_based")
    return ConsoleMetricExporter()


@pytest.mark.parametrize(
    ("exporter", "replaced"),
    [
        (lambda _: ConsoleMetricExporter(), True),
        (otlp, True),
        (delta, False),
        (exponential, False),
        (own_buckets, False),
        (otlp_delta, False),
        (otlp_exponential, False),
        (exemplars, False),
    ],
)
def test_what_an_exporter_wants_otherwise_is_of_the_sdk(
    monkeypatch: pytest.MonkeyPatch, exporter: Any, replaced: bool
) -> None:
    assert can_replace_those_of_the_sdk([ConsoleMetricExporter(), exporter(monkeypatch)]) is replaced
