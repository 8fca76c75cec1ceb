"""The figures of an evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest
from rollout_server.authoring.author_traceback import AuthorError
from rollout_server.authoring.rollout_result import Result, Times
from rollout_server.evaluation.estimators import Estimate
from rollout_server.evaluation.row_result import RowResult
from rollout_server.evaluation.summary import MISSING, MOST_GROUPS, labels_of, summary_of

from tests.evaluation.dataset_rows import rows_of


def result(row: int, reward: float | None, end: str = "stop", reason: str = "stop", ms: float = 1000.0) -> RowResult:
    return RowResult("r", end, reason, reward=reward, row=row, ms=Times(ms))


def failed(row: int, kind: str = "network", failure_class: str = "") -> RowResult:
    return RowResult("r", "failure", kind, reward=0.0, scores={"style": 0.0}, row=row, failure_class=failure_class)


def test_a_reward_that_is_less_by_rounding_passes() -> None:
    def passes(reward: float, threshold: float) -> bool:
        return Result("r", "stop", "stop", reward=reward).passes(threshold)

    assert 0.7 + 0.2 + 0.1 < 1
    assert passes(0.7 + 0.2 + 0.1, 1.0)
    assert passes(-1e-17, 0.0)
    assert not passes(0.99999, 1.0)
    assert not passes(-0.001, 0.0)


def test_a_failure_is_not_a_reward_and_what_nobody_judged_does_not_count() -> None:
    found = summary_of([result(1, 1.0), result(1, 0.5), result(2, None), failed(2), result(3, None)], 1.0)
    assert (found.rows, found.rollouts, found.finished, found.judged, found.passed) == (3, 5, 4, 2, 1)
    assert (found.pass_rate, found.mean_reward) == (0.5, 0.75)
    assert (found.failures, found.failure_classes, found.scores) == ({"network": 1}, {}, {})
    assert (found.pass_at, found.pass_hat, found.pass_rows) == (
        {"1": 0.5, "2": 1.0},
        {"1": 0.5, "2": 0.0},
        {"1": 1, "2": 1},
    )


def test_rows_with_too_few_rollouts_are_left_out_for_a_large_k() -> None:
    found = summary_of([result(1, 1.0), result(1, 0.0), result(1, 0.0), result(2, 1.0), failed(2), failed(2)], 1.0)
    assert found.pass_rows == {"1": 2, "2": 1, "3": 1}
    assert found.pass_at == pytest.approx({"1": (1 / 3 + 1) / 2, "2": 2 / 3, "3": 1.0})
    assert found.pass_hat == pytest.approx({"1": (1 / 3 + 1) / 2, "2": 0.0, "3": 0.0})


@pytest.mark.parametrize(
    ("failure_class", "rate"),
    [("policy", 0.5), ("deadline", 0.5)]
    + [(each, 1.0) for each in ("environment", "tool", "engine", "trainer", "server", "")],
)
def test_only_failures_of_the_model_count_as_not_passed(failure_class: str, rate: float) -> None:
    found = summary_of([result(1, 1.0), failed(1, "timeout", failure_class)], 1.0)
    assert (found.pass_rate, found.mean_reward) == (rate, 1.0)
    assert found.failure_classes == ({failure_class: 1} if failure_class else {})


def test_each_score_has_a_mean_over_the_rollouts_that_have_it() -> None:
    results = [
        RowResult("r", "stop", "stop", reward=1.0, row=row, scores=scores)
        for row, scores in enumerate([{"a": 1.0}, {"a": 0.0, "b": 0.5}, {}, {"a": 0.5}], start=1)
    ]
    found = summary_of([*results, failed(5)], 1.0).scores
    assert found == {"a": Estimate(0.5, pytest.approx((0.25 / 3) ** 0.5), 3), "b": Estimate(0.5, None, 1)}


def test_a_column_divides_the_rows(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, {"level": 10, "info": {"a.b": 1, "c": {"d": "x"}}}, {"level": 9}, {"level": None})
    labels = labels_of(rows, ["level", "info.c.d"])
    found = summary_of([result(1, 1.0), result(1, 0.0), failed(2), result(3, 0.5)], 1.0, labels).by
    assert list(found["level"]) == ["9", "10", MISSING]
    ten, nine = found["level"]["10"], found["level"]["9"]
    assert (ten.rollouts, ten.pass_rate, ten.reward) == (2, 0.5, Estimate(0.5, None, 2))
    assert (nine.rollouts, nine.finished, nine.pass_rate, nine.reward, nine.failures) == (
        1,
        0,
        None,
        None,
        {"network": 1},
    )
    assert {label: figures.rollouts for label, figures in found["info.c.d"].items()} == {MISSING: 2, "x": 2}
    assert labels_of(rows, ["info.a.b"])["info.a.b"] == {1: "1", 2: MISSING, 3: MISSING}


def test_a_column_that_divides_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        AuthorError, match="--by levle: no row has this metadata column; columns: ground_truth, level, kind"
    ):
        labels_of(rows_of(tmp_path, {"level": 1}, {"kind": "a"}), ["levle"])
    with pytest.raises(AuthorError, match=f"has {MOST_GROUPS + 1} different values; at most {MOST_GROUPS}"):
        labels_of(rows_of(tmp_path, *({"id": number} for number in range(MOST_GROUPS + 1))), ["id"])


def test_without_rewards_there_is_no_rate() -> None:
    found = summary_of([result(1, None)], 1.0)
    assert (found.pass_rate, found.mean_reward, found.pass_at) == (None, None, {})
    assert summary_of([], 1.0).pass_rate is None


def test_the_threshold_decides() -> None:
    results = [result(1, 0.5), result(2, 0.49)]
    assert summary_of(results, 0.5).pass_rate == 0.5
    assert summary_of(results, 1.0).pass_rate == 0.0
