"""Estimators of an evaluation: pass@k, pass^k, means with their standard errors, and percentiles."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Sums of squares of larger values would exceed the range of a float; they are scaled.
_SQUARABLE = 1e140


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over rollouts.

    Args:
        mean: the arithmetic mean.
        error: the standard error of the mean; None with fewer than two rows.
        count: number of rollouts with a value.
    """

    mean: float
    error: float | None
    count: int


def estimate(values: Mapping[int, Sequence[float]]) -> Estimate | None:
    """Return the mean of values by row, with the standard error clustered by row; None without values.

    Rollouts of one row are not independent, because they share the prompt. The error is therefore computed from the sums of the
    deviations of each row (cluster-robust standard error; Miller 2024, "Adding Error Bars to Evals", section 2.2):

        error^2 = G / (G - 1) * sum over rows of (sum over the row's values of (value - mean))^2 / N^2

    for N values in G rows. With one value per row it is the usual sqrt(s^2 / N), with s^2 the sample variance. With equally
    many values per row it is the standard error of the mean of the rows' means.
    """
    rows = [row for row in values.values() if row]
    count = sum(map(len, rows))
    if not count:
        return None
    largest = max(abs(value) for row in rows for value in row)
    scale = largest if largest > _SQUARABLE else 1.0
    mean = math.fsum(value / scale for row in rows for value in row) / count
    if len(rows) < 2:
        return Estimate(mean * scale, None, count)
    squares = math.fsum(math.fsum(value / scale - mean for value in row) ** 2 for row in rows)
    return Estimate(mean * scale, math.sqrt(len(rows) / (len(rows) - 1) * squares) / count * scale, count)


def pass_at_k(rollouts: int, passed: int, k: int) -> float:
    """Return the unbiased estimate of pass@k: the probability that k of n rollouts, drawn without replacement, include a pass.

    Formula of Chen et al. 2021, "Evaluating Large Language Models Trained on Code": 1 - C(n - c, k) / C(n, k), where c of n
    rollouts passed. Raises ValueError unless 1 <= k <= n.
    """
    return 1.0 - pass_hat_k(rollouts, rollouts - passed, k)


def pass_hat_k(rollouts: int, passed: int, k: int) -> float:
    """Return the unbiased estimate of pass^k: the probability that k of n rollouts, drawn without replacement, all pass.

    Formula of Yao et al. 2024, "tau-bench: A Benchmark for Tool-Agent-User Interaction in Real-World Domains":
    C(c, k) / C(n, k), where c of n rollouts passed. Raises ValueError unless 1 <= k <= n.
    """
    if not 0 < k <= rollouts:
        raise ValueError(f"k must be from 1 to {rollouts}")
    return math.comb(passed, k) / math.comb(rollouts, k)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile by nearest rank: the smallest value that at least `percent` % of all values do not exceed.

    Raises ValueError without values.
    """
    if not values:
        raise ValueError("a percentile needs at least one value")
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]
