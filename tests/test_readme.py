"""The README's snippets, run as written except for the ports."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollout_client import AsyncClient
from rollout_server.app import Server
from rollout_server.authoring.agent_loader import find_agents
from rollout_server.calculator import Calculator
from rollout_server.settings import Settings
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from rollout_server.testing.trainer import StrictTrainer

from tests.cli.conftest import Invoke, here, invoke
from tests.edge.engine.rolling import CALL
from tests.support.engine_model import EngineModel
from tests.support.engines import VllmEngine, serving
from tests.support.processes import environment

__all__ = ["here", "invoke"]

# Installed plugins that are not needed and cost each process a second.
FOREIGN = "-p no:schemathesis -p no:hypothesispytest"
README_PATH = Path(__file__).parent.parent / "README.md"
README = README_PATH.read_text()


def blocks(language: str, containing: str) -> list[str]:
    found = re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)
    return [block for block in found if containing in block]


@pytest.fixture
async def ports() -> AsyncIterator[dict[str, str]]:
    """The README's addresses, mapped to a server and a trainer that run here."""
    settings = Settings(
        _env_file=None, host="127.0.0.1", http_port=0, grpc_port=0, tokenizers={"Qwen/Qwen3-8B": TOY_TOKENIZER}
    )
    async with Server([Calculator()], settings) as server:
        gateway = f"http://127.0.0.1:{server.http_port}"
        async with StrictTrainer(tools_from=gateway) as trainer:
            yield {
                "http://localhost:9000": gateway,
                "http://localhost:9001": trainer.url,
                "localhost:50051": f"127.0.0.1:{server.grpc_port}",
            }


def with_ports(text: str, ports: dict[str, str]) -> str:
    for written, real in ports.items():
        text = text.replace(written, real)
    return text


async def test_the_request_for_curl(ports: dict[str, str]) -> None:
    (block,) = blocks("sh", "curl")
    body = re.search(r"-d '(.*)'", block, flags=re.DOTALL)
    assert body is not None
    async with httpx.AsyncClient(timeout=60) as client:
        url = with_ports("http://localhost:9000/rollout", ports)
        headers = {"content-type": "application/json"}
        answer = (await client.post(url, content=with_ports(body[1], ports), headers=headers)).json()
    assert answer["status"] == "COMPLETED"
    assert "16" in answer["final_messages"][-1]["content"]


async def test_the_engine(ports: dict[str, str], tmp_path: Path) -> None:
    (block,) = blocks("python", "Target(")
    engine = VllmEngine(EngineModel([CALL, "16\n#### 16"]), model_name="Qwen/Qwen3-8B")
    async with serving(engine):
        output = await run_python(with_ports(block, ports).replace("http://localhost:8000", engine.url), tmp_path)
    trained = sum(len(each.ids) for each in engine.model.seen)
    assert output.startswith(f"reward 1.0: {trained} of ")


async def test_the_trainer_learns(tmp_path: Path) -> None:
    (block,) = blocks("python", "def learn")
    assert block in (README_PATH.parent / "examples" / "reinforce.py").read_text()
    means = [float(line.rpartition(" ")[2]) for line in (await run_python(block, tmp_path)).splitlines()]
    assert len(means) == 15
    assert means[0] < 0.5
    assert sum(means[-3:]) / 3 > 0.9


async def test_the_trainer_leaves_out_rollouts_without_a_reward(tmp_path: Path) -> None:
    (block,) = blocks("python", "def learn")
    changes = {
        "range(15)": "range(2)",
        "n=64": "n=4",
        # Of each group at least one rollout fails, and in the second step all do.
        "    [digit] = random": "    calls.append(1)\n    assert len(calls) in (2, 3)\n    [digit] = random",
        "\nasync def main": "\ncalls = []\n\n\nasync def main",
    }
    for old, new in changes.items():
        assert block.count(old) == 1
        block = block.replace(old, new)
    lines = (await run_python(block, tmp_path)).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["step  0", "step  1"]
    assert lines[1].endswith("mean reward 0.00")


def test_an_agent_with_its_own_loop() -> None:
    (block,) = blocks("python", "Program(")
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["agent"].name == "claude_code"


async def test_the_agent_is_served(here: Path) -> None:
    (block,) = blocks("python", "class Weather")
    assert len([line for line in block.splitlines() if line.strip()]) <= 15
    (here / "weather.py").write_text(block)
    [agent] = find_agents(["weather.py"])
    settings = Settings(_env_file=None, host="127.0.0.1", http=False, grpc_port=0)
    async with Server([agent], settings) as server, AsyncClient(f"127.0.0.1:{server.grpc_port}") as client:
        [served] = await client.agents()
    assert [tool.name for tool in served.tools] == ["temperature"]


def test_the_agents_first_reward(here: Path, invoke: Invoke) -> None:
    (block,) = blocks("python", "class Weather")
    (here / "weather.py").write_text(block)
    (commands,) = blocks("sh", "rollout run weather.py")
    program, *arguments = shlex.split(commands.splitlines()[0], comments=True)
    assert program == "rollout"
    result = invoke(*arguments)
    assert result.exit_code == 0, result.stdout
    assert "21.5" in result.stdout
    assert "reward 1\n" in result.stdout


def test_the_first_project(tmp_path: Path) -> None:
    """The block for agent authors, run line by line in a shell."""
    (block,) = blocks("sh", "rollout new")
    env = environment(PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", PYTEST_ADDOPTS=FOREIGN)
    done = subprocess.run(
        ["bash", "-euc", block], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b4 passed", done.stdout)
    assert "100.0%" in done.stdout
    assert "warning" not in (done.stdout + done.stderr).lower()
    assert (tmp_path / "letter-counter" / "dataset.report.html").is_file()


async def run_python(code: str, directory: Path) -> str:
    import asyncio

    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return output.decode()
