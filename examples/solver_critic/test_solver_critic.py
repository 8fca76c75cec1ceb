"""Tests of the two roles: each sample has the reward of its own role."""

from agent import SolverCritic
from rollout_client.export import to_verl
from rollout_server.local_stack import FinishedRollout, ScriptedModel

TRUTH = {"ground_truth": "12"}


def rewards(rollout: FinishedRollout) -> list[tuple[str, float | None]]:
    """Return role and reward of each sample, as a trainer gets them."""
    return [(sample.role, to_verl(sample)["reward_score"]) for sample in rollout.samples]


def test_a_critic_that_helps(serving, scripted_model: ScriptedModel) -> None:
    model = scripted_model.says("#### 8").says("Those are the corners. WRONG").says("#### 12").says("RIGHT.")
    rollout = serving(SolverCritic()).play("How many edges does a cube have?", model, metadata=TRUTH)
    assert rewards(rollout) == [("agent", 1.0), ("critic", 1.0), ("critic", 1.0)]
    assert (rollout.reward, rollout.scores) == (1.0, {"attempts": 2.0})


def test_a_critic_that_agrees_with_everything(serving, scripted_model: ScriptedModel) -> None:
    model = scripted_model.says("#### 8").says("RIGHT")
    rollout = serving(SolverCritic()).play("How many edges does a cube have?", model, metadata=TRUTH)
    assert rewards(rollout) == [("agent", 0.0), ("critic", 0.0)]


def test_a_critic_that_never_agrees(serving, scripted_model: ScriptedModel) -> None:
    for _ in range(3):
        scripted_model.says("#### 12").says("WRONG")
    rollout = serving(SolverCritic()).play("How many edges does a cube have?", scripted_model, metadata=TRUTH)
    assert rewards(rollout) == [("agent", 1.0), ("critic", 0.0), ("critic", 0.0), ("critic", 0.0)]
    assert all(sample.trainable for sample in rollout.samples)
