"""Statistics of an evaluation."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rollout_server.authoring.author_traceback import AuthorError
from rollout_server.authoring.dataset import DatasetRow
from rollout_server.evaluation.estimators import Estimate, estimate, pass_at_k, pass_hat_k, percentile
from rollout_server.evaluation.row_result import RowResult

_PERCENTILES = (50, 90, 95, 99)
MOST_GROUPS: Final = 200
"""Largest number of different values of a column that divides the rows."""
MISSING: Final = "(no value)"
"""Label of the rows that lack a column."""
_LONGEST_LABEL = 200


@dataclass(frozen=True, slots=True)
class Figures:
    """Statistics over the rollouts of some rows. Failed rollouts have no reward and no scores, and are counted apart.

    Args:
        rows: number of rows with a result.
        rollouts: number of results.
        finished: rollouts that completed.
        judged: completed rollouts with a reward.
        passed: completed rollouts whose reward reaches the threshold.
        pass_rate: passed, as a share of judged rollouts and of those that failed because of the model, that is with class
            "policy" or "deadline"; None if there are none.
        pass_rate_error: its standard error, clustered by row.
        reward: mean over `judged`; None without any reward.
        scores: by name, the mean over completed rollouts with this score.
        failures: number of rollouts by failure category, or by another end that is not completion.
        failure_classes: number of rollouts by failure class.
    """

    rows: int = 0
    rollouts: int = 0
    finished: int = 0
    judged: int = 0
    passed: int = 0
    pass_rate: float | None = None
    pass_rate_error: float | None = None
    reward: Estimate | None = None
    scores: dict[str, Estimate] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    failure_classes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Summary(Figures):
    """Statistics over all rollouts of an evaluation.

    Args:
        threshold: the reward at which a rollout passes.
        pass_at: by k, the unbiased estimate of pass@k, averaged over the rows with at least k rollouts that count.
        pass_hat: by k, the same of pass^k.
        pass_rows: by k, the number of these rows. It is lower for a large k if rollouts failed, so the figures of different k
            may be about different rows.
        mean_reward: `reward.mean`, or None.
        turns: mean per rollout.
        tokens: sums "prompt" and "generated", and "generated_mean" per rollout.
        seconds: "mean" and percentiles "p50", "p90", ... of completed rollouts, by nearest rank.
        tool_calls: sum.
        tool_errors: number of error results by tool.
        examples: the first message of each of `failures`.
        by: figures by column and by its value.
    """

    threshold: float = 1.0
    pass_at: dict[str, float] = field(default_factory=dict)
    pass_hat: dict[str, float] = field(default_factory=dict)
    pass_rows: dict[str, int] = field(default_factory=dict)
    mean_reward: float | None = None
    turns: float = 0.0
    tokens: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    tool_calls: int = 0
    tool_errors: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    by: dict[str, dict[str, Figures]] = field(default_factory=dict)


Labels = Mapping[str, Mapping[int, str]]
"""By column, the label of each row."""


def labels_of(rows: Sequence[DatasetRow], columns: Sequence[str]) -> Labels:
    """Return the labels by which columns divide the rows.

    Args:
        rows: all rows.
        columns: names of metadata columns; `info.level` is the value `level` of the object in the column `info`.

    Raises:
        AuthorError: no row has a column, or it has more than `MOST_GROUPS` different values.
    """
    found: dict[str, dict[int, str]] = {}
    for column in columns:
        found[column] = {row.number: _label(row.metadata, column) for row in rows}
        values = set(found[column].values())
        if values <= {MISSING}:
            names = ", ".join(dict.fromkeys(name for row in rows for name in row.metadata)) or "none"
            raise AuthorError(f"--by {column}: no row has this metadata column; columns: {names}")
        if len(values) > MOST_GROUPS:
            text = f"--by {column}: the column has {len(values)} different values; at most {MOST_GROUPS} are possible"
            raise AuthorError(text)
    return found


def _label(metadata: Mapping[str, Any], path: str) -> str:
    if path in metadata:
        value = metadata[path]
    else:
        name, _, rest = path.partition(".")
        inner = metadata.get(name)
        if rest and isinstance(inner, Mapping):
            return _label(inner, rest)
        value = None
    if value is None:
        return MISSING
    text = (value or "(empty)") if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
    return text if len(text) <= _LONGEST_LABEL else f"{text[:_LONGEST_LABEL]}…"


def summary_of(results: Sequence[RowResult], threshold: float, labels: Labels | None = None) -> Summary:
    """Compute the statistics of results. The order of the results does not matter.

    Args:
        results: the results.
        threshold: the reward at which a rollout passes.
        labels: columns that divide the rows, from `labels_of`.
    """
    results = sorted(results, key=lambda result: (result.row, result.repeat))
    wrong = [result for result in results if not result.finished]
    generated = sum(result.tokens.generated for result in results)
    figures = figures_of(results, threshold)
    return Summary(
        **{name: getattr(figures, name) for name in Figures.__dataclass_fields__},
        threshold=threshold,
        **_pass_figures(results, threshold),
        mean_reward=figures.reward.mean if figures.reward else None,
        turns=_mean([result.turns for result in results]),
        tokens={
            "prompt": sum(result.tokens.prompt for result in results),
            "generated": generated,
            "generated_mean": generated / len(results) if results else 0.0,
        },
        seconds=_spread([result.ms.total / 1000 for result in results if result.finished]),
        tool_calls=sum(result.tool_calls for result in results),
        tool_errors=_sum_counts(result.tool_errors for result in results),
        examples={kind_of(result): result.message or result.reason for result in reversed(wrong)},
        by={column: _divided(results, threshold, each) for column, each in (labels or {}).items()},
    )


def figures_of(results: Sequence[RowResult], threshold: float) -> Figures:
    """Compute the figures of results."""
    finished = [result for result in results if result.finished]
    wrong = [result for result in results if not result.finished]
    judged = [result for result in finished if result.reward is not None]
    rate = estimate(_passes(results, threshold))
    scores = {name: _score(finished, name) for result in finished for name in result.scores}
    return Figures(
        rows=len({result.row for result in results}),
        rollouts=len(results),
        finished=len(finished),
        judged=len(judged),
        passed=sum(result.passes(threshold) for result in judged),
        pass_rate=rate.mean if rate else None,
        pass_rate_error=rate.error if rate else None,
        reward=estimate(_by_row(judged, lambda result: result.reward)),
        scores={name: score for name, score in sorted(scores.items()) if score is not None},
        failures=dict(Counter(map(kind_of, wrong)).most_common()),
        failure_classes=dict(Counter(each.failure_class for each in wrong if each.failure_class).most_common()),
    )


def kind_of(result: RowResult) -> str:
    """Return the category of a failure, or "cancellation"."""
    return result.end if result.end == "cancellation" else result.reason


def _score(finished: Sequence[RowResult], name: str) -> Estimate | None:
    return estimate(_by_row(finished, lambda result: result.scores.get(name)))


def _by_row(results: Iterable[RowResult], value: Callable[[RowResult], float | None]) -> dict[int, list[float]]:
    rows: dict[int, list[float]] = defaultdict(list)
    for result in results:
        found = value(result)
        if found is not None:
            rows[result.row].append(found)
    return rows


def _divided(results: Sequence[RowResult], threshold: float, labels: Mapping[int, str]) -> dict[str, Figures]:
    parts: dict[str, list[RowResult]] = defaultdict(list)
    for result in results:
        parts[labels.get(result.row, MISSING)].append(result)
    return {label: figures_of(parts[label], threshold) for label in sorted(parts, key=_label_order)}


def _label_order(label: str) -> tuple[bool, float, str]:
    """Sort key: numbers by value, before other texts."""
    try:
        return False, float(label), label
    except ValueError:
        return True, 0.0, label


def _pass_figures(results: Sequence[RowResult], threshold: float) -> dict[str, Any]:
    """Return `pass_at`, `pass_hat` and `pass_rows`. The ks are the powers of two and the most rollouts of a row; none below 2."""
    counts = [(len(found), int(sum(found))) for found in _passes(results, threshold).values()]
    most = max((rollouts for rollouts, _ in counts), default=0)
    ks = [*(2**power for power in range(most.bit_length()) if 2**power < most), most] if most > 1 else []
    enough = {k: [each for each in counts if each[0] >= k] for k in ks}
    return {
        "pass_at": {str(k): _mean([pass_at_k(*each, k) for each in rows]) for k, rows in enough.items()},
        "pass_hat": {str(k): _mean([pass_hat_k(*each, k) for each in rows]) for k, rows in enough.items()},
        "pass_rows": {str(k): len(rows) for k, rows in enough.items()},
    }


def _passes(results: Sequence[RowResult], threshold: float) -> dict[int, list[float]]:
    """Return 1.0 or 0.0 for each rollout that counts, by row."""
    return _by_row((result for result in results if result.counts), lambda result: float(result.passes(threshold)))


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {"mean": _mean(values), **{f"p{each}": percentile(values, each) for each in _PERCENTILES}}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _sum_counts(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total.most_common())
