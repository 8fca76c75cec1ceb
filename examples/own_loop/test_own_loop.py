"""Tests of the agent: a right and a wrong result, an error of its tool, and a model that never ends."""

from agent import solve
from rollout_server.local_stack import ScriptedModel

SIXTEEN = {"ground_truth": "16"}


def test_right(serving, scripted_model: ScriptedModel) -> None:
    model = scripted_model.calls("calculate", operation="+", left=5, right=3)
    model.calls("calculate", operation="*", left=8, right=2).says("It is #### 16")
    rollout = serving(solve).play("(5 + 3) * 2?", model, metadata=SIXTEEN)
    assert (rollout.reward, rollout.failure, rollout.tool_results) == (1.0, None, ["8", "16"])
    (sample,) = rollout.samples  # three calls, one conversation
    assert [turn for turn in range(1, 4) if any(span.turn == turn for span in sample.spans)] == [1, 2, 3]


def test_wrong(serving, scripted_model: ScriptedModel) -> None:
    model = scripted_model.calls("calculate", operation="/", left=1, right=0).says("It is #### infinite")
    rollout = serving(solve).play("1 / 0?", model, metadata=SIXTEEN)
    assert (rollout.reward, rollout.tool_results) == (0.0, ["Error: ZeroDivisionError('division by zero')"])


def test_a_limit_ends_it(serving, scripted_model: ScriptedModel) -> None:
    model = scripted_model
    for number in range(9):
        model = model.calls("calculate", operation="+", left=number, right=1)
    rollout = serving(solve).play("Count.", model, metadata=SIXTEEN)
    assert (rollout.stop, rollout.reward, rollout.failure) == ("max_turns", 0.0, None)
