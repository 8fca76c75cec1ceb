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
from rollout_client.export import read_parquet, to_dict
from rollout_server.authoring.project import make_project

from tests.cli.conftest import Invoke, document
from tests.support.processes import ANY_PORTS, COMMAND, command, environment
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


GRADED = """
from hashlib import sha256
from rollout_server import Agent, RewardResult, Run


class Graded(Agent):
    name = "graded"

    async def reward(self, run: Run):
        digest = sha256(run.request.rollout_id.encode()).digest()
        if digest[0] % 4 == 0:
            raise LookupError("no hidden tests")
        return RewardResult(digest[1] % 2, {"style": digest[2] / 255})
"""
LOGGED = """
from pathlib import Path
from rollout_server.testing.script import ScriptedReply


class Logged:
    def reply(self, messages):
        text = messages[-1]["content"]
        with Path("asked").open("a") as file:
            file.write(text + chr(10))
        return ScriptedReply(content=text.upper(), delay=60 if text in Path("slow").read_text().split() else 0)
"""


def graded_folder(folder: Path, slow: str) -> None:
    folder.mkdir()
    rows = [{"question": f"q{number}", "ground_truth": number, "level": number % 2} for number in range(8)]
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "agent.py").write_text(GRADED)
    (folder / "logged.py").write_text(LOGGED)
    (folder / "slow").write_text(slow)


def samples_of(path: Path) -> list[dict[str, Any]]:
    """The samples, without what differs between two runs of the same rollouts."""
    differs = {"uid", "completion_ms", "tool_ms"}
    found = [{key: value for key, value in to_dict(each).items() if key not in differs} for each in read_parquet(path)]
    return sorted(found, key=lambda each: str(each["rollout_id"]))


async def test_an_evaluation_that_is_killed_at_half_goes_on_to_the_same_figures(tmp_path: Path) -> None:
    columns = ("--column", "user_prompt=question", "--column", "system_prompt=")
    asked = ("eval", "agent.py", "d.jsonl", *columns, "--script", "logged.py", "--n", "2", "--by", "level", "--json")
    flags = (*asked, "--samples", "s.parquet", "--concurrency", "2")
    killed, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    graded_folder(killed, slow="q4 q5")
    async with running(*flags, cwd=killed) as evaluating:
        results = killed / "d.results.jsonl"
        while not results.exists() or results.read_bytes().count(b"\n") < 5 or len(questions(killed)) < 6:
            assert evaluating.process.returncode is None
            await asyncio.sleep(0.02)
        evaluating.process.kill()
        await evaluating.process.communicate()
    assert (evaluating.process.returncode, (killed / "s.parquet").exists()) == (-signal.SIGKILL, False)
    assert questions(killed) == [f"q{number}" for number in range(6)]
    with results.open("ab") as file:  # as if the kill had come while a line was written
        file.write(b'{"rollout_id":"row-5-1","end')
    failed = sum(json.loads(line)["end"] == "failure" for line in results.read_bytes().splitlines()[1:5])

    (killed / "slow").write_text("")
    (killed / "asked").unlink()
    resumed = await command(*flags, "--resume", cwd=killed)
    graded_folder(undisturbed, slow="")
    whole = await command(*flags, cwd=undisturbed)

    assert len(questions(killed)) == 16 - (4 - failed)
    assert len(questions(undisturbed)) == 16
    summaries = [json.loads(each.out)["summary"] for each in (resumed, whole)]
    assert [summary.pop("seconds").keys() for summary in summaries] == [{"mean", "p50", "p90", "p95", "p99"}] * 2
    examples = [summary.pop("examples").keys() for summary in summaries]  # their texts contain uids
    assert examples[0] == examples[1]
    assert summaries[0] == summaries[1]
    assert summaries[0]["failures"]
    assert summaries[0]["scores"]["style"]["error"] > 0
    assert samples_of(killed / "s.parquet") == samples_of(undisturbed / "s.parquet")
    assert json.loads(resumed.out)["resumed"] == {"results": 4 - failed, "changed_rows": [], "code_changed": False}


def questions(folder: Path) -> list[str]:
    """What the mock model was asked, sorted."""
    path = folder / "asked"
    return sorted(path.read_text().splitlines()) if path.exists() else []


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
