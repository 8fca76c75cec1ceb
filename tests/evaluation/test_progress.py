"""The progress line of an evaluation."""

from __future__ import annotations

from rollout_server.authoring.rollout_result import Tokens
from rollout_server.evaluation.progress import RunningFigures
from rollout_server.evaluation.row_result import RowResult


def result(reward: float | None, end: str = "stop", generated: int = 30) -> RowResult:
    return RowResult("r", end, end, reward=reward, tokens=Tokens(generated=generated))


def test_the_line_has_done_reward_failures_speed_and_time_left() -> None:
    now = [100.0]
    figures = RunningFigures(10, [], lambda: now[0])
    assert figures.line() == "0/10 · 0 failed"
    for each in (result(1.0), result(0.5), result(None), result(1.0, "failure")):
        now[0] += 10
        figures.add(each)
    assert figures.line() == "4/10 · mean reward 0.750 · 1 failed · 3 tokens/s · 1:00 left"


def test_earlier_results_are_done_but_say_nothing_about_speed() -> None:
    now = [0.0]
    figures = RunningFigures(1003, [result(0.0, generated=1000), result(1.0, "refused")], lambda: now[0])
    assert figures.line() == "2/1003 · mean reward 0.000 · 1 failed"
    now[0] = 20.0
    figures.add(result(1.0, generated=100))
    assert figures.line() == "3/1003 · mean reward 0.500 · 1 failed · 5 tokens/s · 5:33:20 left"
    figures.total = 3
    assert figures.line().endswith("5 tokens/s")
