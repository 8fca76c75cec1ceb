"""Histograms at a fraction of the SDK's price, for the provider that this server has set up itself.

For each value, the SDK makes an object, asks filters and views, and takes several locks; a turn has up to four values. Those of
this module put a value into its bucket, and a reader adds them to what it exports.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from threading import Lock
from time import time_ns
from typing import Any, Final

from opentelemetry.sdk.metrics import Histogram as SdkHistogram
from opentelemetry.sdk.metrics import export
from opentelemetry.sdk.metrics.export import AggregationTemporality, HistogramDataPoint, Metric, MetricsData
from opentelemetry.sdk.metrics.view import DefaultAggregation, ExplicitBucketHistogramAggregation

from rollout_server.edge.tracing.conventions import SCOPE

_MOST: Final = 2000
"""The SDK's default limit for sets of attributes. What is beyond is counted together, under `_OVERFLOW`."""
_OVERFLOW: Final = {"otel.metric.overflow": True}


class _Point:
    """What was recorded with one set of attributes."""

    __slots__ = ("attributes", "counts", "greatest", "least", "started", "total")

    def __init__(self, attributes: Mapping[str, Any], buckets: int) -> None:
        self.attributes = dict(attributes)
        self.counts = [0] * buckets
        self.total: float = 0
        self.least, self.greatest = inf, -inf
        self.started = time_ns()


class Histogram:
    """A histogram with fixed buckets. Bucket i has values of at most `boundaries[i]`, the last one those above all of them."""

    def __init__(self, name: str, unit: str, description: str, boundaries: Sequence[float]) -> None:
        self._described = (name, description, unit)
        self._boundaries = tuple(boundaries)
        self._points: dict[frozenset[tuple[str, Any]], _Point] = {}
        self._lock = Lock()

    def record(self, amount: float, attributes: Mapping[str, Any]) -> None:
        """Add a value, in the unit of the histogram, to those with the same attributes."""
        key = frozenset(attributes.items())
        with self._lock:
            point = self._points.get(key) or self._new_point(key, attributes)
            point.counts[bisect_left(self._boundaries, amount)] += 1
            point.total += amount
            point.least = min(point.least, amount)
            point.greatest = max(point.greatest, amount)

    def metric(self, now: int) -> Metric | None:
        """Return what was recorded until now (Unix time in ns); None if nothing was."""
        with self._lock:
            points = [self._exported(point, now) for point in self._points.values()]
        return Metric(*self._described, export.Histogram(points, AggregationTemporality.CUMULATIVE)) if points else None

    def _new_point(self, key: frozenset[tuple[str, Any]], attributes: Mapping[str, Any]) -> _Point:
        if len(self._points) >= _MOST:
            key, attributes = frozenset(_OVERFLOW.items()), _OVERFLOW
        return self._points.setdefault(key, _Point(attributes, len(self._boundaries) + 1))

    def _exported(self, point: _Point, now: int) -> HistogramDataPoint:
        return HistogramDataPoint(
            attributes=point.attributes,
            start_time_unix_nano=point.started,
            time_unix_nano=now,
            count=sum(point.counts),
            sum=point.total,
            bucket_counts=tuple(point.counts),
            explicit_bounds=self._boundaries,
            min=point.least,
            max=point.greatest,
        )


class Histograms:
    """The histograms of one provider."""

    def __init__(self) -> None:
        self._all: dict[str, Histogram] = {}

    def create_histogram(
        self, name: str, *, unit: str, description: str, explicit_bucket_boundaries_advisory: Sequence[float]
    ) -> Histogram:
        """Return the histogram of this name. See `opentelemetry.metrics.Meter`."""
        new = Histogram(name, unit, description, explicit_bucket_boundaries_advisory)
        return self._all.setdefault(name, new)

    def added_to(self, data: MetricsData) -> MetricsData:
        """Return the data with these histograms in the scope of this server, which has its gauges in any case."""
        now = time_ns()
        found = [metric for each in tuple(self._all.values()) if (metric := each.metric(now)) is not None]
        resources = []
        for resource in data.resource_metrics:
            scopes = [
                replace(each, metrics=[*each.metrics, *found]) if each.scope.name == SCOPE else each
                for each in resource.scope_metrics
            ]
            resources.append(replace(resource, scope_metrics=scopes))
        return MetricsData(resources)


class HistogramReader(export.PeriodicExportingMetricReader):
    """The SDK's reader that exports periodically, which also exports these histograms."""

    def __init__(self, exporter: export.MetricExporter, histograms: Histograms) -> None:
        self._histograms = histograms  # before the SDK's part, which starts a thread
        super().__init__(exporter)

    def _receive_metrics(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **given: Any) -> None:
        super()._receive_metrics(self._histograms.added_to(metrics_data), timeout_millis, **given)


def can_replace_those_of_the_sdk(exporters: Sequence[export.MetricExporter]) -> bool:
    """Return whether these histograms are what the SDK would export: cumulative, in the advised buckets.

    Only the SDK has exemplars, and they are exported only if `OTEL_METRICS_EXEMPLAR_FILTER` is set.
    """
    return "OTEL_METRICS_EXEMPLAR_FILTER" not in os.environ and all(map(_takes_fixed_buckets, exporters))


def _takes_fixed_buckets(exporter: export.MetricExporter) -> bool:
    # The SDK's readers read these two; exporters have no public names for them.
    temporality = (exporter._preferred_temporality or {}).get(SdkHistogram, AggregationTemporality.CUMULATIVE)
    aggregation = (exporter._preferred_aggregation or {}).get(SdkHistogram)
    advised = isinstance(aggregation, ExplicitBucketHistogramAggregation) and (
        vars(aggregation) == vars(ExplicitBucketHistogramAggregation())
    )
    default = aggregation is None or isinstance(aggregation, DefaultAggregation)
    return temporality is AggregationTemporality.CUMULATIVE and (default or advised)
