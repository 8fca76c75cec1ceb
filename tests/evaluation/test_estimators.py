"""Estimators, compared with an enumeration of all draws."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import combinations, product

import pytest
from rollout_server.evaluation.estimators import Estimate, estimate, pass_at_k, pass_hat_k, percentile


@pytest.mark.parametrize("rollouts", range(1, 7))
def test_pass_at_k_and_pass_hat_k_are_shares_of_all_draws(rollouts: int) -> None:
    for passed, k in product(range(rollouts + 1), range(1, rollouts + 1)):
        draws = list(combinations([True] * passed + [False] * (rollouts - passed), k))
        assert pass_at_k(rollouts, passed, k) == pytest.approx(sum(map(any, draws)) / len(draws))
        assert pass_hat_k(rollouts, passed, k) == pytest.approx(sum(map(all, draws)) / len(draws))


@pytest.mark.parametrize("k", [0, 4])
def test_k_is_at_most_the_number_of_rollouts(k: int) -> None:
    for estimator in (pass_at_k, pass_hat_k):
        with pytest.raises(ValueError, match="k must be from 1 to 3"):
            estimator(3, 1, k)


@pytest.mark.parametrize("chance", [0.2, 0.5, 0.9])
def test_they_are_unbiased(chance: float) -> None:
    """The mean over all results of n independent rollouts is the probability itself."""
    n, k = 5, 3
    results = list(product((True, False), repeat=n))
    weights = [math.prod(chance if passed else 1 - chance for passed in result) for result in results]
    for estimator, truth in ((pass_at_k, 1 - (1 - chance) ** k), (pass_hat_k, chance**k)):
        mean = sum(w * estimator(n, sum(result), k) for w, result in zip(weights, results, strict=True))
        assert mean == pytest.approx(truth)


def of_rows(rows: Sequence[Sequence[float]]) -> Estimate:
    found = estimate(dict(enumerate(rows)))
    assert found is not None
    return found


def test_with_one_rollout_per_row_the_error_is_the_usual_one() -> None:
    values = [0.0, 1.0, 1.0, 0.5, 0.25]
    usual = statistics.stdev(values) / math.sqrt(len(values))
    assert of_rows([[value] for value in values]) == Estimate(0.55, pytest.approx(usual), 5)


def test_with_equally_many_rollouts_it_is_the_error_of_the_means_of_the_rows() -> None:
    rows = [[0.0, 1.0, 0.5], [1.0, 1.0, 1.0], [0.0, 0.0, 0.25], [0.5, 0.75, 1.0]]
    means = [statistics.fmean(row) for row in rows]
    assert of_rows(rows).error == pytest.approx(statistics.stdev(means) / math.sqrt(len(means)))


def test_the_squared_error_is_an_unbiased_variance_of_the_mean() -> None:
    """Draw three rows of a population of four in every possible way; rollouts of a row are alike."""
    population = [(0.0, 0.1), (1.0, 0.8), (0.5, 0.5), (0.9, 0.0)]
    draws = [of_rows(rows) for rows in product(population, repeat=3)]
    truth = statistics.pvariance([draw.mean for draw in draws])
    assert statistics.fmean([draw.error**2 for draw in draws if draw.error is not None]) == pytest.approx(truth)


def test_rows_of_different_sizes_have_cross_terms() -> None:
    """Formula of Miller 2024 with the pairs of a row written out, and the factor G / (G - 1) for G rows."""
    rows = [[0.0, 1.0, 1.0], [0.5], [0.25, 0.75]]
    mean = statistics.fmean([value for row in rows for value in row])
    squares = sum((value - mean) ** 2 for row in rows for value in row)
    pairs = sum((a - mean) * (b - mean) for row in rows for i, a in enumerate(row) for j, b in enumerate(row) if i != j)
    assert of_rows(rows).error == pytest.approx(math.sqrt(3 / 2 * (squares + pairs)) / 6)


def test_one_row_has_a_mean_without_an_error() -> None:
    assert of_rows([[1.0, 0.0]]) == Estimate(0.5, None, 2)
    assert of_rows([[1.0], []]) == Estimate(1.0, None, 1)
    assert estimate({1: []}) is None


def test_percentiles_are_values_that_came() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert [percentile(values, percent) for percent in (0, 25, 26, 50, 99, 100)] == [1, 1, 2, 2, 4, 4]
    with pytest.raises(ValueError, match="at least one value"):
        percentile([], 50)


def test_values_near_the_limit_of_a_float_have_a_mean_and_an_error() -> None:
    assert estimate({1: [1e308], 2: [1e308], 3: [1e308]}) == Estimate(1e308, 0.0, 3)
    found = estimate({1: [1.5e308], 2: [-1.5e308]})
    assert found is not None
    assert (found.mean, found.error) == (0.0, pytest.approx(1.5e308))
