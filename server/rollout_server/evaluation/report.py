"""The report of an evaluation: the page for saved rollouts as one HTML file, with a summary above the list of its rollouts."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from osmosis.rollout.v1.rollout_service_pb2 import ROLLOUT_VIEW_FULL
from rollout_gateway.page.standalone import standalone_document, standalone_page
from rollout_gateway.rest.proto_json import response_json

from rollout_server.evaluation.plots import Plot, bar_chart, histogram
from rollout_server.evaluation.row_result import RowResult
from rollout_server.evaluation.row_rollout import rollout_of_result
from rollout_server.evaluation.summary import Summary, kind_of
from rollout_server.inspection.escape import visible

MOST_ROLLOUTS = 1000
MOST_BYTES = 64 << 20
"""Size of the rollouts in a report. Browsers take seconds to open a larger one."""
_LONGEST = 20_000


@dataclass(frozen=True, slots=True)
class ReportFailures:
    """Failures of one class and category, with the message of the first."""

    name: str
    category: str
    rollouts: int
    example: str


def report(facts: Mapping[str, Any], summary: Summary, results: Sequence[RowResult]) -> bytes:
    """Return the report as HTML.

    Args:
        facts: names and values that describe the evaluation, shown at the top; `agent` is the name of its agent.
        summary: figures over all results.
        results: all results. At most `MOST_ROLLOUTS` of them, and `MOST_BYTES` of JSON, are included, failed and low-reward ones
            first.
    """
    from jinja2 import Environment, StrictUndefined

    folder = resources.files("rollout_server.evaluation")
    text = (folder / "report.html.jinja").read_text(encoding="utf-8")
    environment = Environment(undefined=StrictUndefined, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["visible"] = _visible
    rollouts = _rollouts(results, summary.threshold, str(facts["agent"]))
    intro = environment.from_string(text).render(
        facts={key: _value(value) for key, value in facts.items()},
        summary=summary,
        failures=_failures(results),
        plots=[plot for plot in _plots(summary, results) if plot.bars],
        left_out=len(results) - len(rollouts),
    )
    title = f"Evaluation of {_visible(str(facts['agent']))}"
    page = standalone_page(title, intro, (folder / "report.css").read_text(encoding="utf-8"))
    return standalone_document(b'{"rollouts":[' + b",".join(rollouts) + b"]}", page)


def _rollouts(results: Sequence[RowResult], threshold: float, agent: str) -> list[bytes]:
    """Return the rollouts of the results as JSON of the page, the most urgent ones first."""
    found: list[bytes] = []
    size = 0
    for result in sorted(results, key=lambda result: _urgency(result, threshold))[:MOST_ROLLOUTS]:
        rollout = response_json(rollout_of_result(result, agent), ROLLOUT_VIEW_FULL)
        found.append(b'{"rollout":' + rollout + b',"events":[],"texts":{}}')
        size += len(rollout)
        if size > MOST_BYTES:
            break
    return found


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


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _visible(text: str) -> str:
    """Escape each line, so that control characters cannot reverse the text direction or hide other characters."""
    cut = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} … ({len(text) - _LONGEST} characters more)"
    return "\n".join(visible(line) for line in cut.split("\n"))
