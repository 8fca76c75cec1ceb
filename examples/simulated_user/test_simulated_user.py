"""Tests of the assistant with a scripted guest: what is trained, and a guest who cannot be reached."""

from agent import Assistant
from rollout_server.local_stack import ScriptedModel
from scripted import Guest

METADATA = {"wish": "a table for 4 on Friday", "ground_truth": "4 on Friday"}


def test_a_booking(serving, mock_engine, scripted_model: ScriptedModel) -> None:
    model = scripted_model.says("For which day?").says("For how many guests?").calls("book", day="Friday", guests=4)
    served = serving(Assistant(), models=mock_engine(user=Guest()).entries)
    rollout = served.play("A table, please.", model.says("It is booked."), metadata=METADATA)
    said = [message["content"] for message in rollout.messages if message["role"] == "user"]
    assert said == ["A table, please.", "Friday", "4", "Thank you. GOODBYE"]
    assert rollout.reward == 1.0
    (sample,) = rollout.samples
    trained = [span for span in sample.spans if span.author == "model"]
    assert len(trained) == 4
    assert sum(sample.response_mask) == sum(span.stop - span.start for span in trained)


def test_the_wrong_table(serving, mock_engine, scripted_model: ScriptedModel) -> None:
    model = scripted_model.calls("book", day="Monday", guests=4).says("It is booked.")
    served = serving(Assistant(), models=mock_engine(user=Guest()).entries)
    assert served.play("A table, please.", model, metadata=METADATA).reward == 0.0


def test_without_a_guest_the_rollout_fails(serving, scripted_model: ScriptedModel) -> None:
    served = serving(Assistant(), models=["user=http://127.0.0.1:9|user"], retries=0)
    rollout = served.play("A table, please.", scripted_model.says("For which day?"), metadata=METADATA)
    assert (rollout.reward, "model 'user'" in str(rollout.failure)) == (None, True)
