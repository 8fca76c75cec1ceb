"""Valid and invalid return values of an agent's reward."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from rollout_server import Agent, RewardResult, Run

from tests.agent.test_agent import Plain


class Judge(Agent):
    """Return a given reward."""

    name = "judge"

    def __init__(self, judgement: Any) -> None:
        self.judgement = judgement

    async def reward(self, run: Run) -> Any:
        return self.judgement


@pytest.mark.parametrize(
    ("judgement", "verdict"),
    [
        (None, RewardResult()),
        (0.5, RewardResult(0.5)),
        (-1, RewardResult(-1.0)),
        (True, RewardResult(1.0)),
        (RewardResult(True, {"short": False}), RewardResult(1.0, {"short": 0.0})),
        (Fraction(1, 4), RewardResult(0.25)),
        (Decimal("0.5"), RewardResult(0.5)),
        (np.float32(0.25), RewardResult(0.25)),
        (np.array(2), RewardResult(2.0)),
        (RewardResult(), RewardResult()),
        (RewardResult(1, {"style": 2}, '{"why": "so"}'), RewardResult(1.0, {"style": 2.0}, '{"why": "so"}')),
    ],
)
async def test_what_is_a_judgement(judgement: object, verdict: RewardResult) -> None:
    taken = await Judge(judgement).judge(None)
    assert taken == verdict
    assert isinstance(taken.reward, float | None)


@pytest.mark.parametrize(
    ("judgement", "error", "shown"),
    [
        ("1", TypeError, "returned '1'"),
        (Decimal("NaN"), ValueError, "returned Decimal('NaN')"),
        (np.array([1.0, 2.0]), TypeError, "returned array([1., 2.])"),
        ([1.0], TypeError, "returned [1.0]"),
        (1j, TypeError, "returned 1j"),
        (float("nan"), ValueError, "returned nan"),
        (float("-inf"), ValueError, "returned -inf"),
        pytest.param(10**400, ValueError, "not a finite number", id="10**400"),
        (RewardResult(float("nan")), ValueError, "returned nan"),
        (RewardResult(scores={"style": "good"}), TypeError, "score 'style', returned 'good'"),  # type: ignore[dict-item]
        (RewardResult(scores={"style": float("inf")}), ValueError, "score 'style', returned inf"),
        (RewardResult(extra_json="[1]"), ValueError, "extra_json must be one JSON object"),
        (RewardResult(extra_json="{"), ValueError, "extra_json must be one JSON object"),
    ],
)
async def test_what_is_none_is_refused_with_agent_and_value(
    judgement: object, error: type[Exception], shown: str
) -> None:
    with pytest.raises(error) as refused:
        await Judge(judgement).judge(None)
    assert str(refused.value).startswith("agent 'judge': reward")
    assert shown in str(refused.value)


async def test_without_a_reward_there_is_no_judgement() -> None:
    assert await Plain().judge(None) == RewardResult()


class Ranking(Judge):
    """Return a given value for a group."""

    name = "ranking"

    async def reward_group(self, runs: Sequence[Run]) -> Any:
        return self.judgement


async def test_the_rewards_of_a_group_may_be_an_array() -> None:
    runs = [None, None]
    assert await Ranking(np.array([0.5, 1])).judge_group(runs) == [RewardResult(0.5), RewardResult(1.0)]
    with pytest.raises(ValueError, match="returned 3 rewards for 2 runs"):
        await Ranking(np.zeros(3)).judge_group(runs)
    with pytest.raises(TypeError, match="it must return a list with one reward for each run"):
        await Ranking(np.array(0.5)).judge_group(runs)
