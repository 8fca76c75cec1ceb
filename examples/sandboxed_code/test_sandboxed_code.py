"""Tests of the agent with right, wrong and cheating modules, and of the directory's life."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from agent import SandboxedCode
from rollout_server import Run
from rollout_server.local_stack import ScriptedModel

ROW = {"ground_truth": [["double(2)", "4"], ["double('ab')", "'abab'"]]}
RIGHT = "def double(x):\n    return x + x\n"


class Watched(SandboxedCode):
    """Keeps the directories of its rollouts."""

    def __init__(self) -> None:
        self.directories: list[Path] = []

    async def setup(self, run: Run) -> None:
        await super().setup(run)
        self.directories.append(run.state["directory"])


@pytest.fixture
def agent() -> Iterator[Watched]:
    """An agent whose directories are gone at the end of each test."""
    agent = Watched()
    yield agent
    assert len(agent.directories) == 1
    assert not agent.directories[0].exists()


def test_programs_and_hidden_tests_share_the_directory(serving, scripted_model: ScriptedModel, agent: Watched) -> None:
    model = scripted_model.calls("write_solution", code=RIGHT)
    model.calls("run_python", code="import os, solution; print(os.listdir(), solution.double(4))")
    model.calls("run_python", code="open('kept', 'w').write('x')")
    model.calls("run_python", code="print(open('kept').read())").says("Done.")
    rollout = serving(agent).play("Write double(x).", model, metadata=ROW)
    assert rollout.tool_results[1:] == ["['solution.py'] 8\n", "(nothing was printed)", "x\n"]
    assert (rollout.reward, rollout.scores) == (1.0, {"passed": 1.0})


@pytest.mark.parametrize(
    ("code", "passed"),
    [
        ("def double(x):\n    return 2 * abs(x)", 0.5),  # raises for a text
        ("def double(x):\n    print('noise')\n    return x + x", 1.0),
        ("import os; os._exit(0)", 0.0),
        ("raise SystemExit", 0.0),
        ("print('4')\nprint(\"'abab'\", flush=True)\nimport os\nos._exit(0)", 1.0),  # knows the results
        ("def double(x):\n    while True: pass", 0.0),
        ("def double(x):\n    return x + x\nprint('x' * 10**6)", 0.0),  # the results are cut
        ("class All:\n    __repr__ = lambda self: '4'\ndef double(x):\n    return All()", 0.5),
        ("not Python", 0.0),
        ("", 0.0),
    ],
)
def test_modules(
    serving, scripted_model: ScriptedModel, agent: Watched, monkeypatch: pytest.MonkeyPatch, code: str, passed: float
) -> None:
    monkeypatch.setattr("limited.CPU_SECONDS", 1)
    model = scripted_model.calls("write_solution", code=code).says("Done.")
    rollout = serving(agent).play("Write double(x).", model, metadata=ROW)
    assert (rollout.stop, rollout.reward) == ("stop", float(passed == 1.0))
    assert rollout.scores == {"passed": passed}


def test_a_module_written_again_is_the_one_that_is_tested(
    serving, scripted_model: ScriptedModel, agent: Watched
) -> None:
    """Of the same length and within a second, which compiled modules of Python do not tell apart."""
    model = scripted_model.calls("write_solution", code=RIGHT.replace("+", "*"))
    model.calls("run_python", code="import solution; print(solution.double(3))")
    model.calls("write_solution", code=RIGHT).says("Done.")
    rollout = serving(agent).play("Write double(x).", model, metadata=ROW)
    assert (rollout.tool_results[1], rollout.reward) == ("9\n", 1.0)


def test_nothing_was_written(serving, scripted_model: ScriptedModel, agent: Watched) -> None:
    assert serving(agent).play("Write double(x).", scripted_model.says("No."), metadata=ROW).reward == 0.0
