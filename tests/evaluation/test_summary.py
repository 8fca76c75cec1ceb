"""The figures of an evaluation."""

from __future__ import annotations

from itertools import combinations

import pytest
from rollout_server.authoring.rollout_result import Result, Times
from rollout_server.evaluation.summary import pass_at_k, percentile, summary_of


def result(row: int, reward: float | None, end: str = "stop", reason: str = "stop", ms: float = 1000.0) -> Result:
    return Result("r", end, reason, reward=reward, row=row, ms=Times(ms))


@pytest.mark.parametrize("passed", range(6))
def test_pass_at_k_is_the_share_of_draws_with_a_pass(passed: int) -> None:
    rollouts = [True] * passed + [False] * (5 - passed)
    for k in range(1, 6):
        draws = list(combinations(rollouts, k))
        assert pass_at_k(5, passed, k) == pytest.approx(sum(map(any, draws)) / len(draws))
    with pytest.raises(ValueError, match="k must be from 1 to 5"):
        pass_at_k(5, passed, 6)


def test_percentiles_are_values_that_came() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert [percentile(values, percent) for percent in (0, 25, 26, 50, 99, 100)] == [1, 1, 2, 2, 4, 4]
    with pytest.raises(ValueError, match="at least one value"):
        percentile([], 50)


def test_what_went_wrong_did_not_pass_and_what_nobody_judged_does_not_count() -> None:
    found = summary_of(
        [result(1, 1.0), result(1, 0.5), result(2, None), result(2, 0.0, "failure", "network"), result(3, None)], 1.0
    )
    assert (found.rows, found.rollouts, found.finished, found.judged, found.passed) == (3, 5, 4, 2, 1)
    assert found.pass_rate == pytest.approx(1 / 3)
    assert found.mean_reward == 0.75
    assert found.failures == {"network": 1}
    assert found.pass_at == {"1": pytest.approx((0.5 + 0.0) / 2), "2": 1.0}


def test_without_rewards_there_is_no_rate() -> None:
    found = summary_of([result(1, None)], 1.0)
    assert (found.pass_rate, found.mean_reward, found.pass_at) == (None, None, {})
    assert summary_of([], 1.0).pass_rate is None


def test_the_threshold_decides() -> None:
    results = [result(1, 0.5), result(2, 0.49)]
    assert summary_of(results, 0.5).pass_rate == 0.5
    assert summary_of(results, 1.0).pass_rate == 0.0
