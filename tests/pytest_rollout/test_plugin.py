"""The pytest plugin in an author's own project, which uses only the names of its fixtures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROJECT = '''
from rollout_server import Agent, Limits, Run, ToolError, tool


@tool
def temperature(city: str) -> float:
    """Temperature of a city in degrees Celsius."""
    if city not in ("Zürich",):
        raise ToolError(f"no such city: {city}")
    return 21.5


class Weather(Agent):
    name = "weather"
    tools = (temperature,)
    limits = Limits(turns=3)

    async def reward(self, run: Run) -> float:
        return float("21.5" in str(run.messages[-1]["content"]))


class Torn(Agent):
    name = "torn"

    async def play(self, run: Run) -> None:
        await run.sample()
        raise RuntimeError("torn")


class Choosy(Agent):
    name = "choosy"

    async def play(self, run: Run) -> None:
        run.mask(await run.sample(), "a plan")
        await run.append({"role": "user", "content": "Go on."})
        await run.sample()
'''

TESTS = """
import pytest
from weather import Choosy, Torn, Weather
from rollout_server.testing.script import Lie, ScriptedReply


@pytest.mark.parametrize("form", ["tokens", "messages"])
def test_a_tool_and_an_answer(serving, scripted_model, form):
    model = scripted_model.calls("temperature", city="Zürich").says("It is 21.5 degrees.")
    rollout = serving(Weather()).play("How warm is it in Zürich?", model, form=form)
    assert rollout.tool_results == ["21.5"]
    assert rollout.answer == "It is 21.5 degrees."
    assert (rollout.reward, rollout.stop, rollout.failure) == (1.0, "stop", None)
    (sample,) = rollout.samples
    assert 0 < sum(sample.response_mask) < len(sample.response_mask)


def test_an_answer_that_is_masked(serving, scripted_model):
    rollout = serving(Choosy()).play("?", scripted_model.says("A plan.").says("Done."))
    (sample,) = rollout.samples
    assert (sample.response_mask[0], sample.response_mask[-1]) == (0, 1)


async def test_an_asynchronous_test(serving, scripted_model):
    model = scripted_model.calls_together(("temperature", {"city": "Rome"}), ("temperature", '{"city": '))
    rollout = serving(Weather(), http=False).play([{"role": "user", "content": "?"}], model.says("I cannot tell."))
    unknown, broken = rollout.tool_results
    assert unknown == "Error: no such city: Rome"
    assert broken.startswith("Error: Invalid JSON arguments")
    assert rollout.reward == 0.0


def test_one_model_for_many_rollouts_of_several_agents(serving, scripted_model):
    stage = serving(Weather(), Torn())
    model = scripted_model.says("Cold.")
    assert [stage.play("?", model).answer for _ in range(3)] == ["Cold."] * 3
    torn = stage.play("?", model, agent="torn")
    assert torn.stop is None
    assert "agent's play failed" in torn.failure


def test_a_script_that_is_too_short_is_a_failure(serving, scripted_model):
    rollout = serving(Weather()).play("?", scripted_model.calls("temperature", city="Zürich"))
    assert "script" in rollout.failure


def test_a_lie_of_the_trainer_is_noticed(serving, scripted_model):
    rollout = serving(Weather()).play("?", scripted_model.answers(ScriptedReply(content="Warm.", lie=Lie.CHANGED_ID)))
    assert "turn 1" in rollout.failure
    assert rollout.samples == []


def test_refused(serving, scripted_model):
    with pytest.raises(Exception, match="agent"):
        serving(Weather()).play("?", scripted_model.says("."), agent="nobody")
    with pytest.raises(ValueError, match="unknown setting 'max_run'; did you mean max_running"):
        serving(Weather(), max_run=1)


def test_judge(strict_trainer):
    assert strict_trainer.url.startswith("http://127.0.0.1:")
    assert strict_trainer.verdict("none") is None
"""


def test_in_a_project_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "weather.py").write_text(PROJECT)
    (tmp_path / "test_weather.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    done = pytest_in(tmp_path, "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "9 passed" in done.stdout


def test_nothing_of_the_server_is_loaded_until_a_fixture_is_used(tmp_path: Path) -> None:
    (tmp_path / "test_light.py").write_text(
        "import sys\n\n\ndef test_light():\n"
        "    assert 'pytest_rollout' in sys.modules\n"
        "    assert not [name for name in sys.modules if name.split('.')[0] in ('rollout_server', 'grpc', 'transformers')]\n"
    )
    done = pytest_in(tmp_path, "-q", "-p", "no:cacheprovider", "-p", "no:schemathesis")
    assert done.returncode == 0, done.stdout + done.stderr


def pytest_in(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", *arguments]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=110, check=False)
