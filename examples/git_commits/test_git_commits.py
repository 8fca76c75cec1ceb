"""Tests of the agent: what is in the repository counts, not what the model says about it."""

from pathlib import Path

import agent
import pytest
from agent import GitCommits
from rollout_server.local_stack import ScriptedModel

ROW = {"files": {"notes.txt": "Buy tea.\n"}, "ground_truth": [["Add notes", ["notes.txt"]]]}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The repository of the next rollout, so that a script can name it."""
    monkeypatch.setattr(agent, "mkdtemp", lambda prefix: str(tmp_path))
    return str(tmp_path)


def test_a_commit_counts(serving, scripted_model: ScriptedModel, path: str) -> None:
    model = scripted_model.calls("git_add", repo_path=path, files=["notes.txt"])
    model.calls("git_commit", repo_path=path, message="Add notes").says("Done.")
    rollout = serving(GitCommits()).play("Commit the notes.", model, metadata=ROW)
    assert (rollout.reward, rollout.scores) == (1.0, {"commits": 1.0})


def test_words_and_errors_do_not(serving, scripted_model: ScriptedModel, path: str) -> None:
    model = scripted_model.calls("git_commit", repo_path=f"{path}/nowhere", message="Add notes").says("I committed it.")
    rollout = serving(GitCommits()).play("Commit the notes.", model, metadata=ROW)
    assert rollout.tool_results[0].startswith("Error: ")
    assert rollout.reward == 0.0
