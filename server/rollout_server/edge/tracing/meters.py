"""The metrics of the conventions, and those of rollouts, beside the Prometheus endpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final, TypeAlias

from opentelemetry.metrics import CallbackOptions, Meter, Observation
from opentelemetry.metrics import Histogram as ApiHistogram

from rollout_server.core.outcome import failure_class_of
from rollout_server.core.record import Ended
from rollout_server.core.spec import Target
from rollout_server.edge.metrics.observer import ToolNames, Watched, end_labels
from rollout_server.edge.tracing import conventions as names
from rollout_server.edge.tracing.attributes import OTHER, Attribute, target_attributes
from rollout_server.runtime.agent_protocol import AgentProtocol
from rollout_server.runtime.rollout import Rollout

if TYPE_CHECKING:
    from rollout_server.edge.tracing.histograms import Histograms

_Record: TypeAlias = Callable[[float], None]
_RecorderOf: TypeAlias = Callable[[Mapping[str, Attribute]], _Record]
"""Returns the function that adds a value to those of a histogram with these attributes."""

_MOST: Final = 1024
"""Sets of attributes whose recorders are kept: to find one again takes several times as long as to record a value."""


class Meters:
    """Instruments of one server. Attributes have few values: no ids, and of tools only the names of the agent's own.

    Args:
        meter: makes the instruments.
        histograms: makes the histograms; None: the meter does.
    """

    def __init__(self, meter: Meter, histograms: Histograms | None = None) -> None:
        self._meter = meter
        self._histograms = histograms
        duration, tokens = names.DURATION_BUCKETS, names.TOKEN_BUCKETS
        text = "Duration of completions, with their retries."
        self._completions = self._histogram(names.OPERATION_DURATION, "s", text, duration)
        self._tokens = self._histogram(names.TOKEN_USAGE, "{token}", "Tokens of prompts and completions.", tokens)
        self._tools = self._histogram(names.TOOL_DURATION, "s", "Duration of tool calls.", duration)
        text = "Duration of rollouts."
        self._durations = self._histogram(names.ROLLOUT_DURATION, "s", text, names.ROLLOUT_BUCKETS)
        self._rollouts = meter.create_counter(
            names.ROLLOUTS, unit="{rollout}", description="Rollouts that have their outcome."
        )
        self._tool_names = ToolNames()
        self._of_completion = lru_cache(_MOST)(self._completion_recorders)
        self._of_tool = lru_cache(_MOST)(self._tool_recorder)

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

    def completion(self, seconds: float, target: Target, usage: tuple[int, int] | None, error: str | None) -> None:
        """Count a completion. `usage`: lengths of prompt and completion in tokens, if they are known."""
        duration, prompt, generated = self._of_completion(target, error)
        duration(seconds)
        if usage is not None:
            prompt(usage[0])
            generated(usage[1])

    def tool(self, seconds: float, agent: AgentProtocol, name: str, error: str | None) -> None:
        """Count a call of the tool that the model has named, which may not exist."""
        self._of_tool(name if self._tool_names.include(agent, name) else OTHER, error)(seconds)

    def ended(self, rollout: Rollout, ended: Ended) -> None:
        """Count a rollout that has its outcome."""
        (end, reason), failed = end_labels(ended.end), failure_class_of(ended.end)
        shown = {names.AGENT_NAME: rollout.agent.name, names.END: end}
        self._durations(shown)(ended.total_ms / 1000)
        shown[names.END_REASON] = reason
        self._rollouts.add(1, {**shown, names.FAILURE_CLASS: failed.value} if failed is not None else shown)

    def _completion_recorders(self, target: Target, error: str | None) -> tuple[_Record, _Record, _Record]:
        """Return the recorders of durations, prompts and completions."""
        shown = {names.OPERATION: names.CHAT, **target_attributes(target)}
        durations = self._completions({**shown, **({names.ERROR: error} if error else {})})
        prompts, generated = (self._tokens({**shown, names.TOKEN_TYPE: kind}) for kind in ("input", "output"))
        return durations, prompts, generated

    def _tool_recorder(self, name: str, error: str | None) -> _Record:
        return self._tools({names.TOOL_NAME: name, **({names.ERROR: error} if error else {})})

    def _histogram(self, name: str, unit: str, description: str, boundaries: Sequence[float]) -> _RecorderOf:
        create = self._meter.create_histogram if self._histograms is None else self._histograms.create_histogram
        made = create(name, unit=unit, description=description, explicit_bucket_boundaries_advisory=boundaries)
        if isinstance(made, ApiHistogram):
            return lambda attributes: partial(made.record, attributes=attributes)
        return made.recorder
