"""Tests of the calculator agent, with a right and a wrong result."""

from agent import Calculator
from rollout_server.local_stack import ScriptedModel


def test_right(serving, scripted_model: ScriptedModel) -> None:
    model = scripted_model.calls("calculate", operation="+", left=5, right=3)
    model.calls("calculate", operation="*", left=8, right=2).says("It is #### 16")
    rollout = serving(Calculator()).play("(5 + 3) * 2?", model, metadata={"ground_truth": "16"})
    assert rollout.tool_results == ["8", "16"]
    assert rollout.reward == 1.0


def test_wrong(serving, scripted_model: ScriptedModel) -> None:
    model = scripted_model.calls("calculate", operation="/", left=1, right=0).says("It is #### infinite")
    rollout = serving(Calculator()).play("1 / 0?", model, metadata={"ground_truth": "0"})
    assert rollout.tool_results == ["Error: division by zero"]
    assert rollout.reward == 0.0
