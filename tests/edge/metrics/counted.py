"""Rollouts of a real registry observed by the metrics, and a parser for the exposition."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from prometheus_client.parser import text_string_to_metric_families
from rollout_server.agent import Agent
from rollout_server.core.ledger import Prediction, pack_tokens
from rollout_server.core.message import JSON, Message, ToolCall
from rollout_server.core.outcome import Failure, Outcome
from rollout_server.core.record import Answered, Asked
from rollout_server.core.spec import Dialect, Spec, Target
from rollout_server.edge.metrics.observer import MetricsObserver
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.runtime.ports import Clock, CompletionRequest, Fork, Sampler, Tool
from rollout_server.runtime.registry.dependencies import RegistryDependencies
from rollout_server.runtime.registry.registry import RolloutRegistry
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.start_request import Capacity, StartRequest

USER = Message.write({"role": "user", "content": "5 + 3?"})
TARGET = Target("http://trainer:9001", Dialect.HTTP_PLAIN)


@dataclass(frozen=True)
class Exposed:
    """An exposition in Prometheus's text format, parsed."""

    text: str

    def families(self) -> dict[str, str]:
        """The families and their types."""
        return {family.name: family.type for family in text_string_to_metric_families(self.text)}

    def samples(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """All samples by name and labels. Fails for duplicates."""
        found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in text_string_to_metric_families(self.text):
            for sample in family.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                assert key not in found
                found[key] = sample.value
        return found

    def value(self, name: str, **labels: str) -> float:
        """One sample; 0 if it is missing."""
        return self.samples().get((name, frozenset(labels.items())), 0.0)

    def total(self, name: str, **labels: str) -> float:
        """The sum of all samples of that name whose labels include these."""
        wanted = frozenset(labels.items())
        return sum(value for (each, has), value in self.samples().items() if each == name and wanted <= has)

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """The non-zero samples of a name, by the values of these labels."""
        found: dict[tuple[str, ...], float] = {}
        for (each, has), value in self.samples().items():
            if each == name and value:
                key = tuple(dict(has)[label] for label in labels)
                found[key] = found.get(key, 0.0) + value
        return found


def read(metrics: MetricsObserver) -> Exposed:
    """Render and parse the metrics."""
    return Exposed(metrics.exposition().decode())


class Asking:
    """A sampler whose completions come from a function."""

    def __init__(self, answer: Callable[[CompletionRequest], Answered]) -> None:
        self._answer = answer

    async def sample(self, ask: CompletionRequest) -> Answered:
        """Return the completion."""
        await asyncio.sleep(0)
        return self._answer(ask)

    def resume(self, asked: Asked, answered: Answered) -> None:
        """See `Sampler.resume`."""

    def fork(self, fork: Fork) -> Asking:
        """A fork uses the same function."""
        return self


class Counted:
    """A registry and metrics that observe it. `answer` returns the completions of a rollout."""

    def __init__(self, *agents: Agent, capacity: Capacity = Capacity()) -> None:
        loop = asyncio.get_running_loop()
        self.metrics = MetricsObserver()
        self.rollouts: list[Rollout] = []
        self._answers: dict[str, Callable[[CompletionRequest], Answered]] = {}
        numbers = count(1)
        self.roster = RolloutRegistry(
            agents,
            self._open,
            lambda: f"u{next(numbers)}",
            capacity=capacity,
            dependencies=RegistryDependencies(clock=Clock(loop.time, loop.time), observer=self.metrics),
        )
        self.metrics.watch_registry(self.roster)

    def start(self, answer: Callable[[CompletionRequest], Answered], **spec: object) -> Rollout:
        """Start a new rollout."""
        rollout_id = f"r{len(self.rollouts) + 1}"
        self._answers[rollout_id] = answer
        made = Spec(rollout_id, (USER,), TARGET, **spec)  # type: ignore[arg-type]
        rollout, _ = self.roster.start(self.roster.admission.admit(StartRequest(made, "me")))
        self.rollouts.append(rollout)
        return rollout

    async def play(self, answer: Callable[[CompletionRequest], Answered], **spec: object) -> Outcome:
        """Run a new rollout to its end."""
        return await outcome_of(self.start(answer, **spec))

    def exposed(self) -> Exposed:
        """Render and parse the metrics."""
        return read(self.metrics)

    def _open(self, uid: str, spec: Spec, tools: Sequence[Tool]) -> Sampler:
        return Asking(self._answers[spec.rollout_id])


async def outcome_of(rollout: Rollout) -> Outcome:
    """Wait for the outcome."""
    await rollout.log.final_entry()
    assert rollout.outcome is not None
    return rollout.outcome


def said(ask: CompletionRequest, *calls: ToolCall, **fields: object) -> Answered:
    """A completion of two tokens after a prompt predicted as one token."""
    message: dict[str, JSON] = {"role": "assistant", "content": "done"}
    if calls:
        message["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls
        ]
    given: dict[str, object] = {
        "token_ids": pack_tokens([7, 8]),
        "predicted": Prediction(pack_tokens(), pack_tokens([ask.asked.turn])),
        "tool_calls": len(calls),
        **fields,
    }
    return Answered(ask.asked.turn, Message.write(message), "stop", **given)  # type: ignore[arg-type]


def done(ask: CompletionRequest) -> Answered:
    """End the rollout in its first turn."""
    return said(ask)


def calling(*turns: Sequence[ToolCall], **fields: object) -> Callable[[CompletionRequest], Answered]:
    """Call tools in the first turns, then end."""
    return lambda ask: said(ask, *(turns[ask.asked.turn - 1] if ask.asked.turn <= len(turns) else ()), **fields)


def failing(failure: Failure) -> Callable[[CompletionRequest], Answered]:
    """Fail."""

    def fail(ask: CompletionRequest) -> Answered:
        raise RolloutFailed(failure)

    return fail


def call(name: str, arguments: str = "{}", call_id: str = "c") -> ToolCall:
    """A tool call in the format of models."""
    return ToolCall(call_id, name, arguments)


ADD = call("add", '{"a": 5, "b": 3}')


def ledger_tokens(outcomes: Sequence[Outcome]) -> Mapping[tuple[str, ...], float]:
    """Tokens by author and reason, computed from the ledgers."""
    found: dict[tuple[str, ...], float] = {}
    for outcome in outcomes:
        for segment in outcome.segments:
            for span in segment.spans:
                key = (span.author.value, span.reason.value if span.reason is not None else "generated")
                found[key] = found.get(key, 0.0) + span.stop - span.start
    return {key: value for key, value in found.items() if value}
