"""The report of an evaluation: one HTML file without scripts and network access, which shows model output as plain text."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from rollout_server.evaluation.plots import Plot, bar_chart, histogram
from rollout_server.evaluation.row_result import RowResult
from rollout_server.evaluation.summary import Summary, kind_of
from rollout_server.inspection.escape import EMPTY, visible

MOST_TRANSCRIPTS = 1000
_LONGEST = 20_000


@dataclass(frozen=True, slots=True)
class ReportMessage:
    """One message of a transcript."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class ReportRollout:
    """A rollout with its row and its transcript.

    Args:
        result: the result.
        mark: "passed", "not passed", "no reward" or "failed".
        facts: ground truth and metadata of the row.
        messages: the conversation, or the prompt if the rollout has none.
    """

    result: RowResult
    mark: str
    facts: Mapping[str, str]
    messages: tuple[ReportMessage, ...]


@dataclass(frozen=True, slots=True)
class ReportFailures:
    """Failures of one class and category, with the message of the first."""

    name: str
    category: str
    rollouts: int
    example: str


def report(facts: Mapping[str, Any], summary: Summary, results: Sequence[RowResult]) -> str:
    """Return the report as HTML.

    Args:
        facts: names and values that describe the evaluation, shown at the top.
        summary: figures over all results.
        results: all results. Transcripts are included for at most `MOST_TRANSCRIPTS`, failed and low-reward ones first.
    """
    from jinja2 import Environment, StrictUndefined

    text = (resources.files("rollout_server.evaluation") / "report.html.jinja").read_text(encoding="utf-8")
    environment = Environment(undefined=StrictUndefined, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["visible"] = _visible
    chosen = sorted(results, key=lambda result: _urgency(result, summary.threshold))[:MOST_TRANSCRIPTS]
    return environment.from_string(text).render(
        facts={key: _value(value) for key, value in facts.items()},
        summary=summary,
        failures=_failures(results),
        plots=[plot for plot in _plots(summary, results) if plot.bars],
        rollouts=[_report_rollout(result, summary.threshold) for result in chosen],
        left_out=len(results) - len(chosen),
    )


def _failures(results: Sequence[RowResult]) -> list[ReportFailures]:
    """Return the failures by class and category, the most frequent first."""
    found: dict[tuple[str, str], list[RowResult]] = defaultdict(list)
    for result in results:
        if not result.finished:
            found[result.failure_class, kind_of(result)].append(result)
    ordered = sorted(found.items(), key=lambda item: -len(item[1]))
    return [ReportFailures(*names, len(each), each[0].message or each[0].reason) for names, each in ordered]


def _plots(summary: Summary, results: Sequence[RowResult]) -> Iterator[Plot]:
    finished = [result for result in results if result.finished]
    yield bar_chart("How rollouts ended", _ends(results, summary.threshold))
    yield histogram("Reward", [result.reward for result in finished if result.reward is not None])
    yield histogram("Time of a rollout", [result.ms.total / 1000 for result in finished], " s")
    yield histogram("Tokens generated", [float(result.tokens.generated) for result in finished])
    yield histogram("Turns", [float(result.turns) for result in finished])
    yield bar_chart("Failures by class", summary.failure_classes)
    yield bar_chart("Failures by category", summary.failures)
    yield bar_chart("Errors by tool", summary.tool_errors)


def _ends(results: Sequence[RowResult], threshold: float) -> dict[str, int]:
    marks = [_mark(result, threshold) for result in results]
    return {mark: marks.count(mark) for mark in dict.fromkeys(marks)}


def _mark(result: RowResult, threshold: float) -> str:
    if not result.finished:
        return "failed"
    if result.reward is None:
        return "no reward"
    return "passed" if result.passes(threshold) else "not passed"


def _urgency(result: RowResult, threshold: float) -> tuple[int, float, int, int]:
    """Sort key: failed rollouts first, then by increasing reward, then by row."""
    order = {"failed": 0, "not passed": 1, "no reward": 2, "passed": 3}
    reward = result.reward if result.finished and result.reward is not None else 0.0
    return order[_mark(result, threshold)], reward, result.row, result.repeat


def _report_rollout(result: RowResult, threshold: float) -> ReportRollout:
    messages = tuple(each for message in result.messages or result.prompt for each in _report_messages(message))
    truth = {} if result.ground_truth is None else {"ground truth": result.ground_truth}
    facts = {name: _value(value) for name, value in {**truth, **result.metadata}.items()}
    return ReportRollout(result, _mark(result, threshold), facts, messages)


def _report_messages(message: Mapping[str, Any]) -> Iterator[ReportMessage]:
    role = str(message.get("role", ""))
    for key, who in (("reasoning_content", f"{role}, thinking"), ("content", role)):
        if message.get(key):
            yield ReportMessage(who, _value(message[key]))
    calls = message.get("tool_calls")
    if not calls and not message.get("content"):
        yield ReportMessage(role, EMPTY)
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", {}) if isinstance(call, Mapping) else {}
        yield ReportMessage(f"{role}, call", f"{function.get('name')} {_value(function.get('arguments'))}")


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _visible(text: str) -> str:
    """Escape each line, so that control characters cannot reverse the text direction or hide other characters."""
    cut = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} … ({len(text) - _LONGEST} characters more)"
    return "\n".join(visible(line) for line in cut.split("\n"))
