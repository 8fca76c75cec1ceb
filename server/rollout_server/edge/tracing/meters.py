"""The metrics of the conventions, and those of rollouts, beside the Prometheus endpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from rollout_server.core.outcome import failure_class_of
from rollout_server.core.record import Ended
from rollout_server.edge.metrics.observer import Watched, end_labels
from rollout_server.edge.tracing import conventions as names
from rollout_server.edge.tracing.attributes import OTHER, Attributes
from rollout_server.runtime.rollout import Rollout

if TYPE_CHECKING:
    from rollout_server.edge.tracing.histograms import Histograms

_OF_COMPLETIONS = (names.OPERATION, names.PROVIDER, names.MODEL, names.SERVER_ADDRESS, names.SERVER_PORT, names.ERROR)


class Meters:
    """Instruments of one server. Attributes have few values: no ids, and of tools only the names of the agent's own.

    Args:
        meter: makes the instruments.
        histograms: makes the histograms; None: the meter does.
    """

    def __init__(self, meter: Meter, histograms: Histograms | None = None) -> None:
        self._meter = meter
        create = meter.create_histogram if histograms is None else histograms.create_histogram
        self._completions = create(
            names.OPERATION_DURATION,
            unit="s",
            description="Duration of completions, with their retries.",
            explicit_bucket_boundaries_advisory=names.DURATION_BUCKETS,
        )
        self._tokens = create(
            names.TOKEN_USAGE,
            unit="{token}",
            description="Tokens of prompts and completions.",
            explicit_bucket_boundaries_advisory=names.TOKEN_BUCKETS,
        )
        self._tools = create(
            names.TOOL_DURATION,
            unit="s",
            description="Duration of tool calls.",
            explicit_bucket_boundaries_advisory=names.DURATION_BUCKETS,
        )
        self._rollouts = meter.create_counter(
            names.ROLLOUTS, unit="{rollout}", description="Rollouts that have their outcome."
        )
        self._durations = create(
            names.ROLLOUT_DURATION,
            unit="s",
            description="Duration of rollouts.",
            explicit_bucket_boundaries_advisory=names.ROLLOUT_BUCKETS,
        )

    def watch(self, registry: Watched) -> None:
        """Observe the numbers of running and waiting rollouts."""
        gauges: Iterable[tuple[str, str, Callable[[], int]]] = (
            (names.RUNNING, "Rollouts that are running.", lambda: registry.running),
            (names.QUEUED, "Rollouts that wait for a slot.", lambda: registry.queued),
        )
        for name, text, value in gauges:

            def observe(_: CallbackOptions, value: Callable[[], int] = value) -> Iterable[Observation]:
                return [Observation(value())]

            self._meter.create_observable_gauge(name, [observe], unit="{rollout}", description=text)

    def completion(self, seconds: float, attributes: Attributes) -> None:
        """Count a completion, by the attributes of its span."""
        shown = {name: attributes[name] for name in _OF_COMPLETIONS if name in attributes}
        self._completions.record(seconds, shown)
        shown.pop(names.ERROR, None)
        for kind, name in (("input", names.INPUT_TOKENS), ("output", names.OUTPUT_TOKENS)):
            tokens = attributes.get(name)
            if isinstance(tokens, int):
                self._tokens.record(tokens, {**shown, names.TOKEN_TYPE: kind})

    def tool(self, seconds: float, rollout: Rollout, attributes: Attributes) -> None:
        """Count a tool call, by the attributes of its span."""
        name = attributes[names.TOOL_NAME]
        shown = {names.TOOL_NAME: name if any(tool.name == name for tool in rollout.agent.offered_tools) else OTHER}
        error = attributes.get(names.ERROR)
        self._tools.record(seconds, {**shown, names.ERROR: error} if error else shown)

    def ended(self, rollout: Rollout, ended: Ended) -> None:
        """Count a rollout that has its outcome."""
        (end, reason), failed = end_labels(ended.end), failure_class_of(ended.end)
        shown = {names.AGENT_NAME: rollout.agent.name, names.END: end}
        self._durations.record(ended.total_ms / 1000, shown)
        shown[names.END_REASON] = reason
        self._rollouts.add(1, {**shown, names.FAILURE_CLASS: failed.value} if failed is not None else shown)
