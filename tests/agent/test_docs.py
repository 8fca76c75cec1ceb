"""The snippets of docs/agents.md: the agents run and the tests pass."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

PLAYED = """
from basket import Basket
from brief import Brief
from careful import Careful
from clear import Clear
from coder import Coder
from countdown import Countdown
from debate import Debate
from moody import Moody
from numbers_ import Numbers
from reviewed import Reviewed
from rollout_server.testing.script import ScriptedReply
from squares import Squares


def test_a_loop_of_its_own(serving, scripted_model):
    model = scripted_model.says("First this.").says("It is 4.").says("Sure.")
    rollout = serving(Careful()).play("2 + 2?", model)
    assert (rollout.reward, rollout.scores, rollout.failure) == (1.0, {"turns": 3.0}, None)
    main, look = rollout.samples
    assert (main.kind, look.kind) == ("main", "subagent")
    assert [span.reason for span in main.spans if span.author == "model"] == ["author", None]


def test_a_directory_that_is_there_for_the_reward(serving, scripted_model, tmp_path, monkeypatch):
    stage = serving(Coder())
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    rollout = stage.play("2 + 2?", scripted_model.says("4"), metadata={"ground_truth": "4"})
    assert (rollout.reward, rollout.warnings, list(tmp_path.iterdir())) == (1.0, [], [])


def test_a_group(serving):
    stage = serving(Brief())
    question = [{"role": "user", "content": "What is 5 plus 3?"}]
    fields = {"messages": question, "completions": stage.trainer.url, "tokenizer": "toy"}
    started = stage.client.start_group(4, metadata={"ground_truth": "could not"}, **fields)  # it has no tools
    outcomes = [outcome.rollout.outcome for outcome in stage.client.watch_group(started.group_id)]
    assert [(outcome.reward, dict(outcome.scores)) for outcome in outcomes] == [(1.0, {"better": 0.0})] * 4


class Scripted:
    def __init__(self, text):
        self.text = text

    def reply(self, messages):
        return ScriptedReply(content=self.text)


def test_a_rubric_with_a_judge_and_a_critic(serving, scripted_model, mock_engine):
    models = mock_engine(judge=Scripted("Fine.\\nScore: 6/10"), critic=Scripted("Is it?"))
    model = scripted_model.says("It is 5.").says("It is 4.")
    rollout = serving(Clear(), models=models.entries).play("2 + 2?", model, metadata={"ground_truth": "4"})
    assert rollout.scores == {"correct": 1.0, "brief": 1.0, "clarity": 6.0}
    assert (rollout.reward, rollout.messages[2]["content"]) == (1.5, "Is it?")


def test_a_conversation_of_a_further_model(serving, scripted_model, mock_engine):
    model = scripted_model.says("It is 5.").says("It is 4.")
    rollout = serving(Reviewed(), models=mock_engine(critic=Scripted("Is it?")).entries).play("2 + 2?", model)
    assert (rollout.failure, len(rollout.samples)) == (None, 1)  # the mock engine reports no ids
    assert rollout.messages[2]["content"] == "Is it?"


def test_policies(serving, scripted_model):
    model = scripted_model.calls_together(("factor", {"number": 12}), ("look_up", {"word": "oak"})).says("Done.")
    assert serving(Numbers()).play("?", model).tool_results == ["[2, 2, 3]", "oak is a word"]


def test_the_rollout_in_a_tool(serving, scripted_model):
    model = scripted_model.calls("put", fruit="pear").calls("put", fruit="fig").calls("count", fruit="fig").says("Done.")
    rollout = serving(Basket()).play("?", model, metadata={"wanted": ["pear", "fig"]})
    assert rollout.tool_results == ["The basket has pear.", "The basket has pear, fig.", "1"]
    assert rollout.reward == 1.0


def test_a_world_that_speaks(serving, scripted_model):
    model = scripted_model.says("2").says("0").says("1")
    rollout = serving(Countdown()).play("Count.", model, metadata={"ground_truth": 2})
    assert (rollout.stop, rollout.reward, rollout.samples[0].turn_scores) == ("stop", 1.5, [1.0, -0.5, 1.0])


def test_roles(serving, scripted_model):
    model = scripted_model.says("Yes.").says("No. " * 300).says("The objection is.")
    samples = serving(Debate()).play("Is it so?", model).samples
    assert [(each.role, each.trainable, each.reward) for each in samples] == [
        ("agent", True, 0.0),
        ("opponent", True, 0.5),
        ("referee", False, None),
    ]


def test_tools_by_request(serving, scripted_model):
    stage = serving(Moody())
    model = scripted_model.calls("shout", text="a").says("Done.")
    assert stage.play("?", model).tool_results == ["A"]
    assert "Unknown function" in stage.play("?", model, metadata={"quiet": True}).tool_results[0]


def test_rows_of_the_agent(serving, scripted_model):
    row = next(Squares().dataset("test"))
    truth = {"ground_truth": row["ground_truth"]}
    assert serving(Squares()).play(row["prompt"], scripted_model.says("10000"), metadata=truth).reward == 1.0
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    names = (
        "shop",
        "numbers_",
        "basket",
        "careful",
        "coder",
        "clear",
        "reviewed",
        "countdown",
        "debate",
        "brief",
        "moody",
        "squares",
        "test_shop",
    )
    for name, block in zip(names, BLOCKS, strict=True):
        (tmp_path / f"{name}.py").write_text(block)
    (tmp_path / "test_played.py").write_text(PLAYED)
    return tmp_path


def test_the_snippets_run(project: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "13 passed" in done.stdout
