"""Tests of the game: each completion has the reward that the world gave it, in the outcome and in the sample."""

import pytest
from agent import GuessTheNumber
from rollout_client.export import to_trl, to_verl
from rollout_server.local_stack import ScriptedModel


def test_each_guess_has_its_own_reward(serving, scripted_model: ScriptedModel) -> None:
    model = scripted_model.says("Is it 50?").says("40?").says("Hm.").says("It is 75 or 62. I say 62.").says("It is 61.")
    rollout = serving(GuessTheNumber()).play("Guess my number.", model, metadata={"ground_truth": "61"})
    spoken = [message["content"] for message in rollout.messages if message["role"] == "user"]
    assert spoken[1:] == ["Higher.", "Higher.", "Write a number from 1 to 100.", "Lower.", "Yes, it is 61."]
    (sample,) = rollout.samples
    assert sample.turn_scores == [0.0, -0.1, -0.2, 0.0, 1.0]
    assert (rollout.stop, rollout.reward, sample.reward) == ("stop", pytest.approx(0.7), pytest.approx(0.7))
    assert to_verl(sample)["extra_fields"]["turn_scores"] == sample.turn_scores
    assert to_trl([sample])["rollout_turn_scores"] == [sample.turn_scores]


def test_a_game_that_is_not_won(serving, scripted_model: ScriptedModel) -> None:
    for _ in range(10):
        scripted_model.says("50")
    rollout = serving(GuessTheNumber()).play("Guess my number.", scripted_model, metadata={"ground_truth": 51})
    assert (rollout.stop, rollout.reward) == ("max_turns", pytest.approx(-0.9))


def test_the_world_chooses_a_number_if_the_row_has_none(serving, scripted_model: ScriptedModel) -> None:
    for guess in range(1, 11):
        scripted_model.says(str(10 * guess))
    rollout = serving(GuessTheNumber()).play("Guess my number.", scripted_model)
    _, *spoken = [message["content"] for message in rollout.messages if message["role"] == "user"]
    below = spoken.count("Higher.")
    assert spoken[:below] == ["Higher."] * below
    assert set(spoken[below:]) == {"Lower."} or spoken[below:] == [f"Yes, it is {10 * (below + 1)}."]
