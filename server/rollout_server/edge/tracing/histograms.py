"""Histograms at a fraction of the SDK's price, for the provider that this server has set up itself.

For each value, the SDK makes an object, asks filters and views, and takes several locks; a turn has up to four values. Those of
this module keep a value until many are put into their buckets together, and a reader adds them to what it exports.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
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
_TOGETHER: Final = 512
"""Values that are put into their buckets together."""
_OVERFLOW: Final = {"otel.metric.overflow": True}


class _Point:
    """What was recorded with one set of attributes.

    Values are kept, and put into their buckets together: sorted, which takes a fraction of the time of one after the other.
    """

    def __init__(self, attributes: Mapping[str, Any], boundaries: Sequence[float]) -> None:
        self._attributes = dict(attributes)
        self._boundaries = boundaries
        self._values: deque[float] = deque()
        self._counts = [0] * (len(boundaries) + 1)
        self._total: float = 0
        self._least, self._greatest = inf, -inf
        self._started = time_ns()
        self._lock = Lock()

    def record(self, amount: float) -> None:
        """Add a value, in the unit of the histogram."""
        self._values.append(amount)
        if len(self._values) >= _TOGETHER:
            with self._lock:
                self._count()

    def exported(self, now: int) -> HistogramDataPoint | None:
        """Return what was recorded until now (Unix time in ns); None if nothing was."""
        with self._lock:
            self._count()
            if not (count := sum(self._counts)):
                return None
            return HistogramDataPoint(
                attributes=self._attributes,
                start_time_unix_nano=self._started,
                time_unix_nano=now,
                count=count,
                sum=self._total,
                bucket_counts=tuple(self._counts),
                explicit_bounds=self._boundaries,
                min=self._least,
                max=self._greatest,
            )

    def _count(self) -> None:
        """Put the values into their buckets. Other threads may add values meanwhile."""
        values = sorted(self._values.popleft() for _ in range(len(self._values)))
        if values:
            ends = [bisect_right(values, boundary) for boundary in self._boundaries]
            for bucket, (start, stop) in enumerate(pairwise((0, *ends, len(values)))):
                self._counts[bucket] += stop - start
            self._total += sum(values)
            self._least, self._greatest = min(self._least, values[0]), max(self._greatest, values[-1])


class Histogram:
    """A histogram with fixed buckets. Bucket i has values of at most `boundaries[i]`, the last one those above all of them."""

    def __init__(self, name: str, unit: str, description: str, boundaries: Sequence[float]) -> None:
        self._described = (name, description, unit)
        self._boundaries = tuple(boundaries)
        self._points: dict[frozenset[tuple[str, Any]], _Point] = {}
        self._lock = Lock()

    def recorder(self, attributes: Mapping[str, Any]) -> Callable[[float], None]:
        """Return the function that adds a value, in the unit of the histogram, to those with these attributes."""
        key = frozenset(attributes.items())
        with self._lock:
            if key not in self._points and len(self._points) >= _MOST:
                key, attributes = frozenset(_OVERFLOW.items()), _OVERFLOW
            return self._points.setdefault(key, _Point(attributes, self._boundaries)).record

    def metric(self, now: int) -> Metric | None:
        """Return what was recorded until now (Unix time in ns); None if nothing was."""
        with self._lock:
            points = [found for point in self._points.values() if (found := point.exported(now)) is not None]
        return Metric(*self._described, export.Histogram(points, AggregationTemporality.CUMULATIVE)) if points else None


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
