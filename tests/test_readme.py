"""The README's snippets, run as they are written, save for the ports."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from rollout_server.app import Server
from rollout_server.calculator import Calculator
from rollout_server.settings import Settings
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from rollout_server.testing.trainer import StrictTrainer

README = (Path(__file__).parent.parent / "README.md").read_text()


def blocks(language: str, containing: str) -> list[str]:
    found = re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)
    return [block for block in found if containing in block]


@pytest.fixture
async def ports() -> AsyncIterator[dict[str, str]]:
    """The README's addresses, and those of a server and a trainer that run here."""
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


async def test_the_python_client(ports: dict[str, str], tmp_path: Path) -> None:
    (block,) = blocks("python", "rollout_client")
    output = await run_python(with_ports(block, ports), tmp_path)
    *events, last = output.strip().splitlines()
    assert events[0] == "1 accepted"
    assert events[-1].endswith("finished")
    assert "42" in last
    assert r"\x01" in last or "1, 1" in last


async def test_the_agent_is_served(tmp_path: Path) -> None:
    (block,) = blocks("python", "class Weather")
    assert len([line for line in block.splitlines() if line.strip()]) <= 15
    (tmp_path / "weather.py").write_text(block)
    output = await run_python(
        "import asyncio\n"
        "from weather import Weather\n"
        "from rollout_server.app import Server\n"
        "from rollout_server.settings import Settings\n"
        "async def main():\n"
        "    async with Server([Weather()], Settings(host='127.0.0.1', http_port=0, grpc_port=0)) as server:\n"
        "        print(server.grpc_port > 0, [tool.name for tool in Weather.tools])\n"
        "asyncio.run(main())\n",
        tmp_path,
    )
    assert output.strip() == "True ['temperature']"


def test_the_first_project(tmp_path: Path) -> None:
    """The block for authors, line by line, in a shell."""
    (block,) = blocks("sh", "rollout new")
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euc", block], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "100.0%" in done.stdout
    assert (tmp_path / "letter-counter" / "dataset.report.html").is_file()


async def run_python(code: str, directory: Path) -> str:
    import asyncio

    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return output.decode()
