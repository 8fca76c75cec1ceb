"""Tests of the rubric: the rule, the judge, and a judge that gives no score."""

from collections.abc import Callable

import pytest
from agent import Summarizer, one_sentence
from rollout_server.local_stack import ScriptedModel
from rollout_server.testing.script import ScriptedReply
from scripted import Critic

METADATA = {"ground_truth": "bees apple"}


class Rambling:
    """A judge that never gives a score."""

    def reply(self, messages: object) -> ScriptedReply:
        """Return no score."""
        return ScriptedReply(content="A fine summary, in my view.")


@pytest.mark.parametrize(("response", "score"), [("Bees fly.", 1.0), ("Bees. They fly.", 0.0), ("Bees", 0.0)])
def test_one_sentence(response: str, score: float) -> None:
    assert one_sentence(response) == score


@pytest.mark.parametrize(("said", "reward"), [("Bees like apple trees.", 1.0), ("Bees fly.", 0.75), ("No idea", 0.0)])
def test_the_weighted_sum(
    serving: Callable[..., object],
    mock_engine: Callable[..., object],
    scripted_model: ScriptedModel,
    said: str,
    reward: float,
) -> None:
    served = serving(Summarizer(), models=mock_engine(judge=Critic()).entries)
    rollout = served.play("Bees ...", scripted_model.says(said), metadata=METADATA)
    assert rollout.reward == reward
    assert set(rollout.scores) == {"one_sentence", "coverage"}


def test_a_judge_without_a_score_is_a_failure_and_not_a_reward_of_0(serving, mock_engine, scripted_model) -> None:
    served = serving(Summarizer(), models=mock_engine(judge=Rambling()).entries)
    rollout = served.play("Bees ...", scripted_model.says("Bees fly."), metadata=METADATA)
    assert rollout.reward is None
    assert "no score in 3 replies" in str(rollout.failure)
