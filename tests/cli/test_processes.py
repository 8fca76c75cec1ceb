"""Commands that run until they are stopped: servers with JSON output, and an interrupted evaluation."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollout_client import AsyncClient
from rollout_server.authoring.project import make_project

from tests.cli.conftest import Invoke, document
from tests.support.processes import ANY_PORTS, COMMAND, environment
from tests.testing.conftest import KeyedCaller

AGENT = "from rollout_server import Agent\n\n\nclass A(Agent):\n    name = '{}'\n"
LOUD = "import os\nos.system('echo from a program')\nos.write(1, b'from below')\n"


class Running:
    """A command whose standard output is read line by line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def document(self) -> dict[str, Any]:
        """The next line, parsed as JSON."""
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        assert line, await self.said()
        found: dict[str, Any] = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        return found

    async def rest(self) -> tuple[str, int]:
        """Wait for the exit; return the rest of standard output, and the exit code."""
        out, _ = await self.process.communicate()
        assert self.process.returncode is not None
        return out.decode(), self.process.returncode

    async def said_until(self, text: str) -> None:
        """Read standard error until a line that contains the text."""
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            if text in line.decode():
                return
        raise AssertionError(f"standard error never contained {text!r}")

    async def said(self) -> str:
        """The rest of standard error."""
        assert self.process.stderr is not None
        return (await self.process.stderr.read()).decode()


@contextlib.asynccontextmanager
async def running(*arguments: str, cwd: Path) -> AsyncIterator[Running]:
    """Run `rollout ARGUMENTS` and kill it at the end of the block."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *arguments,
        cwd=cwd,
        env=environment(ROLLOUT_TOKENIZERS_OFFLINE="true"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        # A shell's background job ignores SIGINT and its children inherit that, so restore the default.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield Running(process)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def served(port: int) -> list[str]:
    async with AsyncClient(f"127.0.0.1:{port}") as client:
        return sorted(agent.name for agent in await client.agents())


async def test_agents_are_served_anew_when_their_file_changes(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT.format("one"))
    (tmp_path / "other.py").write_text(AGENT.format("other"))
    async with running("serve", *ANY_PORTS, "agent.py", "other.py:A", "--reload", "--json", cwd=tmp_path) as serving:
        first = (await serving.document())["serving"]
        assert first["agents"] == ["one", "other"]
        assert await served(first["grpc_port"]) == ["one", "other"]

        (tmp_path / "agent.py").write_text("def broken(:\n")
        await serving.said_until("changed, restarting the server")
        error = (await serving.document())["error"]  # the mistake is reported, and watching continues
        assert (error["file"], error["line"]) == ("agent.py", 1)
        (tmp_path / "agent.py").write_text(AGENT.format("two"))
        second = (await serving.document())["serving"]
        assert await served(second["grpc_port"]) == ["other", "two"]

        serving.process.terminate()
        assert await serving.process.wait() == 0
        with pytest.raises(OSError, match=str(second["grpc_port"])):
            await asyncio.open_connection("127.0.0.1", second["grpc_port"])


async def test_nothing_but_the_document_is_on_standard_output(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(LOUD + AGENT.format("loud"))
    async with running("validate", "agent.py", "--json", cwd=tmp_path) as validating:
        out, said = await validating.process.communicate()
        assert json.loads(out)["valid"]
        assert "from a program" in said.decode()
        assert "from below" in said.decode()


async def test_the_gateway_says_where_it_serves(tmp_path: Path) -> None:
    named = ("--server", "127.0.0.1:1", "--host", "127.0.0.1", "--port", "0", "--log-format", "text")
    async with running("gateway", *named, "--json", cwd=tmp_path) as gateway:
        serving = (await gateway.document())["serving"]
        assert (serving["url"], serving["servers"]) == (f"http://127.0.0.1:{serving['port']}", ["127.0.0.1:1"])
        async with httpx.AsyncClient(base_url=serving["url"], trust_env=False) as client:
            assert (await client.get("/healthz")).status_code == 200
        gateway.process.terminate()
        assert await gateway.rest() == ("", 0)


async def test_the_trainer_tells_each_outcome(tmp_path: Path) -> None:
    async with running("trainer", "--port", "0", "--tools-from", "", "--json", cwd=tmp_path) as trainer:
        serving = (await trainer.document())["serving"]
        assert serving["grpc_target"].startswith("127.0.0.1:")
        async with httpx.AsyncClient(base_url=serving["url"], trust_env=False) as client:
            asking = KeyedCaller(client, rollout_id="b\x1b[2J\nad")
            assert (await client.get("/verdicts")).json() == {"verdicts": []}
            await asking.play()
            body = json.dumps(asking.outcome(reward=None, finish_reason="\ud800")).replace(
                '"reward": null', '"reward": 1e999'
            )
            await client.post("/v1/rollout/completed", content=body, headers={"idempotency-key": "outcome"})
        verdict = (await trainer.document())["verdict"]
        assert (verdict["rollout_id"], verdict["turns"]) == ("b\x1b[2J\nad", 3)
        assert (verdict["outcome"]["reward"], verdict["outcome"]["finish_reason"]) == (None, "\ud800")
        trainer.process.terminate()
        assert await trainer.rest() == ("", 0)


async def test_an_evaluation_that_is_interrupted_goes_on(here: Path, invoke: Invoke) -> None:
    make_project("letters", here)
    folder = here / "letters"
    slow = [{"reply": {"content": "3"}}], [{"reply": {"content": "3", "delay": 60}}]
    asked = ("test", "agent.py", "dataset.jsonl", "--script", "script.json", "--concurrency", "1", "--json")
    (folder / "script.json").write_text(json.dumps({"lines": slow[1]}))
    async with running(*asked, cwd=folder) as testing:
        while not (folder / "dataset.results.jsonl").exists():
            assert testing.process.returncode is None
            await asyncio.sleep(0.02)
        os.kill(testing.process.pid, signal.SIGINT)
        out, err = await testing.process.communicate()
    assert testing.process.returncode == 130, err.decode()
    assert "--resume continues dataset.results.jsonl" in json.loads(out)["error"]["message"]
    assert b"Traceback" not in err
    (folder / "script.json").write_text(json.dumps({"lines": slow[0]}))
    os.chdir(folder)
    again = await asyncio.to_thread(invoke, *asked, "--resume")
    assert document(again)["summary"]["rollouts"] == 3
