"""Updates the metrics from the records of rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, Protocol

from prometheus_client import Gauge, generate_latest

from rollout_server.core.ledger import Author, MaskReason
from rollout_server.core.outcome import Cancellation, End, Failure
from rollout_server.core.record import (
    Accepted,
    Answered,
    CaptureSettled,
    DriftFound,
    Ended,
    Note,
    SegmentOpened,
    ToolReturned,
)
from rollout_server.edge.metrics.families import (
    CANCELLATIONS,
    GENERATED,
    OTHER,
    RESAMPLED,
    STOPS,
    UNKNOWN,
    WARNINGS,
    Families,
)
from rollout_server.runtime.agent_protocol import AgentProtocol
from rollout_server.runtime.log import Entry
from rollout_server.runtime.registry.dependencies import Attempt
from rollout_server.runtime.rollout import Rollout

_MOST_TOOLSETS = 100
"""Number of toolsets with a label of their own; others count as "other"."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Watched(Protocol):
    """The registry's values that every scrape reads, from any thread."""

    @property
    def agents(self) -> Mapping[str, AgentProtocol]:
        """Agents by name."""

    @property
    def running(self) -> int:
        """Number of running rollouts."""

    @property
    def queued(self) -> int:
        """Number of waiting rollouts."""

    @property
    def active_bytes(self) -> int:
        """Approximate memory of rollouts."""


class ToolNames:
    """The names of the tools of agents, read once: later changes must not add label values."""

    def __init__(self) -> None:
        self._names: dict[str, frozenset[str]] = {}

    def include(self, agent: AgentProtocol, name: str) -> bool:
        """Return whether the agent has a tool of this name."""
        found = self._names.get(agent.name)
        if found is None:
            found = self._names[agent.name] = frozenset(tool.name for tool in agent.offered_tools)
        return name in found


class MetricsObserver:
    """Observes the rollouts of one server. Takes a few microseconds per record and stores nothing per rollout."""

    def __init__(self) -> None:
        self.families = Families()
        self._tools = ToolNames()
        self._toolsets: set[str] = set()
        # Records of other types are not counted.
        self._counting: Mapping[type, Callable[[Rollout, Any], None]] = MappingProxyType(
            {
                Accepted: self._count_start,
                Answered: self._count_completion,
                ToolReturned: self._count_tool_result,
                SegmentOpened: self._count_segment,
                DriftFound: self._count_drift,
                Note: self._count_resampling,
                CaptureSettled: self._count_decisions,
                Ended: self._count_end,
            }
        )

    def recorded(self, rollout: Rollout, entries: Sequence[Entry]) -> None:
        """Count the entries, which the rollout's log and machine already contain."""
        for entry in entries:
            count = self._counting.get(type(entry.record))
            if count is not None:
                count(rollout, entry.record)

    def delivered(self, rollout: Rollout, attempt: Attempt, milliseconds: float) -> None:
        """Count one attempt to deliver an outcome."""
        self.families.delivery(attempt.value).observe(milliseconds / 1000)

    def count_model_call(self, result: str) -> None:
        """Count one call at a model endpoint. `result` is one of `MODEL_CALLS`."""
        self.families.model_calls(result).inc()

    def observe_toolset(self, toolset: str, result: str, seconds: float) -> None:
        """Count one call of a toolset's tool."""
        label = toolset
        if toolset not in self._toolsets:
            # Requests name toolsets, so there may be any number.
            label = toolset if len(self._toolsets) < _MOST_TOOLSETS else OTHER
            self._toolsets.add(label)
        self.families.toolset(label, result).observe(seconds)

    def count_tool_call(self, agent: AgentProtocol, tool: str, failed: bool, seconds: float) -> None:
        """Count one call of a tool that the model, or an agent that owns its loop, has named: it may not exist."""
        name = tool if self._tools.include(agent, tool) else UNKNOWN
        self.families.tool(name, "true" if failed else "false").observe(seconds)

    def watch_registry(self, registry: Watched) -> None:
        """Expose the numbers of running and waiting rollouts of one registry."""
        self.watch("running", "Rollouts that are running.", lambda: registry.running)
        self.watch("queued", "Rollouts that wait for a slot.", lambda: registry.queued)
        self.watch(
            "active_bytes",
            "Approximate memory of rollouts that wait, run or deliver their outcome.",
            lambda: registry.active_bytes,
        )
        for name, agent in registry.agents.items():
            self.families.begin_agent(name)
            self._toolsets.update(map(str, agent.toolsets))  # before those that requests name

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Expose a number as the gauge `rollout_NAME`. Every scrape calls `value`, from any thread."""
        Gauge(f"rollout_{name}", text, registry=self.families.registry).set_function(value)

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format (`CONTENT_TYPE`)."""
        return generate_latest(self.families.registry)

    def _count_start(self, rollout: Rollout, record: Accepted) -> None:
        self.families.accepted(record.agent).inc()

    def _count_completion(self, rollout: Rollout, record: Answered) -> None:
        families, agent = self.families, rollout.agent.name
        families.turns(agent).inc()
        families.completion(agent).observe(record.elapsed_ms / 1000)
        if record.attempts > 1:
            families.retries.inc(record.attempts - 1)
        self._count_tokens(rollout, record.turn)

    def _count_tokens(self, rollout: Rollout, turn: int) -> None:
        """Count the spans that the completion of this turn added to the trajectory.

        These are the completion's own spans and the environment tokens before it. Environment tokens belong to a trajectory
        only once a completion follows (law 6 of the ledger), so they are counted with that completion.
        """
        segment = rollout.machine.of_turn(turn).line.segment
        for span in reversed(segment.spans if segment is not None else ()):
            generated = span.author is Author.MODEL
            if span.reason is MaskReason.PROMPT or (generated and span.turn != turn):
                return  # the prompt was counted with its segment, earlier completions in their turns
            reason = span.reason.value if span.reason is not None else GENERATED
            self.families.tokens(span.author.value, reason).inc(span.stop - span.start)

    def _count_tool_result(self, rollout: Rollout, record: ToolReturned) -> None:
        self.count_tool_call(rollout.agent, record.call.name, record.failed, record.elapsed_ms / 1000)

    def _count_segment(self, rollout: Rollout, record: SegmentOpened) -> None:
        self.families.segments(record.origin.kind.value).inc()
        self.families.tokens(Author.OTHER.value, MaskReason.PROMPT.value).inc(record.prompt_tokens)

    def _count_drift(self, rollout: Rollout, record: DriftFound) -> None:
        self.families.drift(record.drift.kind.value).inc()

    def _count_resampling(self, rollout: Rollout, record: Note) -> None:
        if record.code == RESAMPLED:
            self.families.resampled.inc()

    def _count_decisions(self, rollout: Rollout, record: CaptureSettled) -> None:
        for decision, number in asdict(record.report).items():
            self.families.decisions(decision).inc(number)

    def _count_end(self, rollout: Rollout, record: Ended) -> None:
        families, agent = self.families, rollout.agent.name
        end, reason = end_labels(record.end)
        families.finished(agent, end, reason).inc()
        families.queue(agent).observe(record.queued_ms / 1000)
        families.duration(agent, end).observe(record.total_ms / 1000)
        outcome = rollout.outcome
        for warned in outcome.warnings if outcome is not None else ():
            families.warnings(warned.code if warned.code in WARNINGS else OTHER).inc()


def end_labels(end: End) -> tuple[str, str]:
    """Return the kind of an end and its reason, as label values."""
    if isinstance(end, Failure):
        return "failure", end.category.value
    if isinstance(end, Cancellation):
        word = end.reason.partition(":")[0]
        return "cancellation", word if word in CANCELLATIONS else OTHER
    return "stop", end.reason if end.reason in STOPS else OTHER
