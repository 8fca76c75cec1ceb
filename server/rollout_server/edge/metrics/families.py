"""What is counted. Names begin with `rollout_`, times are in seconds, and every label has a few known values.

Words that agents, models, callers and trainers choose are never label values: whoever chooses words could fill the memory of this
server and of the one that reads it. They count as "other" or "unknown".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    Metric,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.metrics import MetricWrapperBase

from rollout_server.core.ledger import Author, DriftKind, MaskReason, SegmentKind
from rollout_server.core.outcome import Category
from rollout_server.runtime.registry.dependencies import Attempt

OTHER = "other"
UNKNOWN = "unknown"
GENERATED = "generated"
"""Stands where a span has no reason to be masked: the model wrote it."""

# The contract's words for stops (Stop.reason), then the finish reasons of trainers of the asynchronous dialect.
STOPS = frozenset({"stop", "max_turns", "max_tokens", "max_bytes", "length", "tool_calls", "content_filter"})
CANCELLATIONS = frozenset({"detached", "shutdown"})
# The contract's words for warnings (Warning.code).
RESAMPLED = "resampled"
WARNINGS = frozenset(
    {
        RESAMPLED,
        "token_drift",
        "logprobs_missing",
        "unverified",
        "tokens_unknown",
        "length_exceeded",
        "rendering_inexact",
        "policy_stale",
        "conversation_unnamed",
        "environment_unseen",
        "short_form_dropped",
        "logprobs_positive",
        "token_unknown",
    }
)

# A model takes from milliseconds to many minutes for a turn, and a rollout from nothing to a day.
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 14400)
_LAG_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)

_Family = TypeVar("_Family", bound=MetricWrapperBase)


class Labelled(Generic[_Family]):
    """A family and its children by label values. Looking one up here costs half of what the family's own way does."""

    def __init__(self, family: _Family) -> None:
        self._family = family
        self._children: dict[tuple[str, ...], _Family] = {}

    def __call__(self, *labels: str) -> _Family:
        """The child with these label values; it is there from the first call on."""
        child = self._children.get(labels)
        if child is None:
            child = self._children[labels] = self._family.labels(*labels)
        return child


class MetricsRegistry(CollectorRegistry):
    """A registry whose counters do not also say when they were created, which would nearly double what is read each time."""

    def collect(self) -> Iterable[Metric]:
        """All there is."""
        for metric in super().collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


class Families:
    """Everything that is counted, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = MetricsRegistry()
        self.accepted = self._counters("accepted", "Rollouts taken.", "agent")
        self.finished = self._counters("finished", "Rollouts that ended, and how.", "agent", "end", "reason")
        self.turns = self._counters("turns", "Completions that trainers answered.", "agent")
        self.tokens = self._counters("tokens", "Tokens in ledgers, by who wrote them and why.", "author", "reason")
        self.drift = self._counters("drift", "Prompts of trainers that were not what was expected.", "kind")
        self.segments = self._counters("segments", "Segments opened, each a training sample.", "kind")
        self.retries = self._counter(
            "completion_retries", "Requests beyond the first for completions that were answered."
        )
        self.resampled = self._counter("resampled", "Retries that may have generated a turn twice.")
        self.ignored = self._counter(
            "stream_answers_ignored", "Answers of trainers on streams that came late, twice, or to no ask at all."
        )
        self.warnings = self._counters("warnings", "Warnings in outcomes.", "code")
        self.queue = self._times("queue", "From accepted to the first turn, or to an end in the queue.", "agent")
        self.duration = self._times("duration", "From the first turn to the end.", "agent", "end")
        self.completion = self._times("completion", "From a completion's first request to its answer.", "agent")
        self.tool = self._times("tool", "Tool calls.", "tool", "failed")
        self.delivery = self._times("delivery_attempt", "Attempts to deliver an outcome.", "result")
        self.loop_lag = Histogram(
            "rollout_loop_lag_seconds",
            "How late the event loop woke a sleeper.",
            registry=self.registry,
            buckets=_LAG_SECONDS,
        )
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self._begin()

    def begin_agent(self, agent: str) -> None:
        """Has an agent's counters begin at 0, so that the first rollout already shows as an increase."""
        self.accepted(agent)
        self.turns(agent)
        self.finished(agent, "stop", "stop")
        self.finished(agent, "cancellation", OTHER)
        for category in Category:
            self.finished(agent, "failure", category.value)

    def _begin(self) -> None:
        self.tokens(Author.MODEL.value, GENERATED)
        for reason in MaskReason:
            self.tokens(Author.OTHER.value, reason.value)
        for drift in DriftKind:
            self.drift(drift.value)
        for segment in SegmentKind:
            self.segments(segment.value)
        for attempt in Attempt:
            self.delivery(attempt.value)
        for code in WARNINGS:
            self.warnings(code)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"rollout_{name}", text, registry=self.registry)

    def _counters(self, name: str, text: str, *labels: str) -> Labelled[Counter]:
        return Labelled(Counter(f"rollout_{name}", text, labels, registry=self.registry))

    def _times(self, name: str, text: str, *labels: str) -> Labelled[Histogram]:
        return Labelled(Histogram(f"rollout_{name}_seconds", text, labels, registry=self.registry, buckets=_SECONDS))
