"""The snippets of the pages about agents that own their loop, run as written except for the programs and the addresses."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from rollout_client import Target
from rollout_server import ExternalAgent, FunctionAgent, Program
from rollout_server.local_stack import LocalStack, ScriptedModel

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = ROOT / ".venv-clients/lib/python3.11/site-packages"
AGENT = "import sys; print(*sys.argv[1:], sep='|')"
Serving = Callable[..., LocalStack]


def snippets(page: str, language: str = "python") -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return [
        re.sub("^   ", "", block, flags=re.MULTILINE)
        for block in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    ]


def agent_of(block: str, name: str = "agent") -> Any:
    defined: dict[str, Any] = {}
    exec(block, defined)
    return defined[name]


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs with the names of those on the pages, which print their arguments, and the template of a page."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("claude", "codex", "my-agent"):
        (folder / name).write_text(f"#!{sys.executable} -IS\n{AGENT}\n")
        (folder / name).chmod(0o755)
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository" / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


@pytest.mark.parametrize(
    ("page", "number", "printed"),
    [
        ("own-loop.md", 2, "Do it."),
        ("own-loop-program.md", 0, "-p|Do it.|--permission-mode|bypassPermissions"),
        ("own-loop-program.md", 5, '-p|Do it.|--permission-mode|bypassPermissions|--mcp-config|{"mcpServers"'),
        ("own-loop-program.md", 1, 'exec|--skip-git-repo-check|--model|rollout|-c|openai_base_url="http://'),
    ],
)
def test_programs(serving: Serving, scripted_model: ScriptedModel, page: str, number: int, printed: str) -> None:
    agent = agent_of(snippets(page)[number])
    assert isinstance(agent, Program)
    rollout = serving(agent).play("Do it.", scripted_model.says("-"))
    assert rollout.failure is None
    assert printed in next(event.note.text for event in rollout.events if event.HasField("note"))


def test_a_program_with_a_reward(serving: Serving, scripted_model: ScriptedModel) -> None:
    fixer = agent_of(snippets("own-loop-program.md")[2], "Fixer")()
    stack = serving(fixer)
    assert [stack.play(task, scripted_model.says("-")).reward for task in ("Fix it, please.", "Fix it.")] == [1.0, 0.0]


@pytest.mark.parametrize(("number", "program"), [(3, "docker"), (4, "bwrap")])
def test_prefixes(number: int, program: str) -> None:
    agent = agent_of(snippets("own-loop-program.md")[number])
    assert (agent.prefix[0], agent.command[0]) == (program, "my-agent")


@pytest.mark.skipif(not shutil.which("bwrap"), reason="bubblewrap is not installed")
def test_bubblewrap(serving: Serving, scripted_model: ScriptedModel) -> None:
    agent = agent_of(snippets("own-loop-program.md")[4])
    agent.prefix = (*agent.prefix, "--ro-bind", str(Path.cwd()), str(Path.cwd()))
    assert serving(agent).play("Do it.", scripted_model.says("-")).failure is None


def test_options() -> None:
    agent = agent_of(snippets("own-loop.md")[3])
    assert isinstance(agent, ExternalAgent)
    assert (agent.capture.model, len(agent.capture.auxiliary)) == ("qwen3-coder", 1)


def test_functions_are_agents() -> None:
    for block, name in zip(snippets("own-loop.md"), ("solve", "graph"), strict=False):
        assert isinstance(agent_of(block, name), FunctionAgent)


@pytest.mark.skipif(not CLIENTS.is_dir(), reason="the clients are not installed: make environments")
@pytest.mark.parametrize(("number", "name"), [(0, "solve"), (1, "graph"), (4, "noted")])
def test_functions_with_real_clients(number: int, name: str, tmp_path: Path) -> None:
    """The clients are not among the server's requirements, so another program adds them."""
    (tmp_path / "agent.py").write_text(snippets("own-loop.md")[number])
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2 + 2?", "ground_truth": "4"}\n')
    model = (
        "from rollout_server.testing.script import ScriptedReply\n\n\nclass Model:\n    def reply(self, messages):\n"
    )
    (tmp_path / "scripted.py").write_text(f"{model}        return ScriptedReply(content='4')\n")
    program = f"import sys; sys.path.append({str(CLIENTS)!r}); from rollout_server.cli import main; main()"
    arguments = ["eval", f"agent.py:{name}", "rows.jsonl", "--script", "scripted.py", "--json"]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout)["summary"]
    assert (summary["finished"], summary["reward"]["mean"] if name == "solve" else 1.0) == (1, 1.0)


def shell(script: str, variables: Mapping[str, str]) -> Any:
    done = subprocess.run(
        ["sh", "-ec", script], env={"PATH": "/usr/bin:/bin", **variables}, capture_output=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_an_agent_that_runs_elsewhere(serving: Serving, scripted_model: ScriptedModel, rollout_loop: Any) -> None:
    agent = agent_of(snippets("own-loop-external.md")[0])
    stack = serving(agent)
    rollout_loop.run(stack.trainer.put_script("far", scripted_model.says("It is 4.").script))
    target = Target(f"grpc://{stack.trainer.grpc_target}", "grpc")
    question = [{"role": "user", "content": "2 + 2?"}]
    started = stack.client.start(
        messages=question, rollout_id="far", completions=target, tokenizer="toy", agent="remote"
    )
    assert started.access is not None
    variables = {"BASE_URL": started.access.base_url, "KEY": started.access.key}
    _, call, finish, listing = snippets("own-loop-external.md", "sh")
    assert shell(listing, variables)["result"] == {"tools": []}
    assert shell(call, variables)["choices"][0]["message"]["content"] == "It is 4."
    assert shell(finish, variables) == {"repeated": False}
    outcome = stack.client.wait(started.uid).outcome
    assert (outcome.reward, dict(outcome.scores)) == (1.0, {"tests": 0.5})
