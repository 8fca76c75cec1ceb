"""Agents that own their loop on a real server: programs, functions and agents that run elsewhere."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollout_client import Target
from rollout_client.samples import samples
from rollout_server import Agent, ExternalAgent, Limits, Program, RewardResult, Rubric, Run, own_loop
from rollout_server.agent import program
from rollout_server.local_stack import FinishedRollout, LocalStack, ScriptedModel

from tests.support.examples import processes_in

Serving = Callable[..., LocalStack]
ASKED = "Is it?"
LOOP = """
import json, os, sys, urllib.request

def ask(messages):
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    body = json.dumps({"model": os.environ["ROLLOUT_MODEL"], "messages": messages}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as response:
        return json.load(response)["choices"][0]["message"]

messages = [{"role": "user", "content": sys.argv[1]}]
messages.append(ask(messages))
messages += [{"role": "user", "content": "Is it?"}]
messages.append(ask(messages))
print(messages[-1]["content"])
"""
PYTHON = (sys.executable, "-ISc")


class Played(Agent):
    """The same conversation, played by an agent of this package."""

    name = "played"

    async def play(self, run: Run) -> None:
        """Ask twice."""
        await run.sample()
        await run.append({"role": "user", "content": ASKED})
        await run.sample()


@own_loop
async def asks_twice(task: str, http: httpx.AsyncClient) -> None:
    """Asks twice."""
    messages: list[Any] = [{"role": "user", "content": task}]
    for more in ([{"role": "user", "content": ASKED}], []):
        response = await http.post("chat/completions", json={"model": "any", "messages": messages})
        messages += [response.raise_for_status().json()["choices"][0]["message"], *more]


@own_loop
def asks_twice_in_a_thread(task: str, http: httpx.Client, metadata: Any, model: str, access: Any, run: Run) -> float:
    """Asks twice, with the messages API."""
    assert (model, access.key in repr(access), run.metadata) == ("rollout", False, metadata)
    messages: list[Any] = [{"role": "user", "content": task}]
    for more in ([{"role": "user", "content": ASKED}], []):
        body = {"model": "any", "max_tokens": 1000, "messages": messages}
        answer = http.post("messages", json=body).raise_for_status().json()
        messages += [{"role": "assistant", "content": answer["content"]}, *more]
    return 0.25


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory for temporary files. Nothing is in it after a test, and no process."""
    scratch = tmp_path / "tmp"  # short: a path of a Unix socket has at most 107 characters
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    yield scratch
    assert (list(scratch.iterdir()), list(processes_in(scratch))) == ([], [])


@pytest.fixture
def two(scripted_model: ScriptedModel) -> ScriptedModel:
    """A model that answers twice."""
    return scripted_model.says("It is 4.", reasoning="Two and two.").says("Yes, it is.")


def tokens(rollout: FinishedRollout) -> Any:
    return [
        (each.prompt_ids, each.response_ids, each.response_mask, each.logprobs, each.kind, each.trainable)
        for each in rollout.samples
    ]


def looping(**options: Any) -> Program:
    return Program([*PYTHON, LOOP, "{task}"], **{"name": "looping", **options})


@pytest.mark.parametrize("form", ["tokens", "messages"])
@pytest.mark.parametrize("agent", [asks_twice, asks_twice_in_a_thread, looping()], ids=lambda agent: agent.name)
def test_its_samples_are_those_of_an_agent(serving: Serving, two: ScriptedModel, agent: Agent, form: Any) -> None:
    played = serving(Played()).play("2 + 2?", two, form=form)
    own = serving(agent).play("2 + 2?", two, form=form, metadata={"a": 1})
    assert (own.failure, own.stop, len(own.samples)) == (None, "stop", 1)
    assert tokens(own) == tokens(played)
    assert own.messages == played.messages
    assert own.reward == (0.25 if agent is asks_twice_in_a_thread else None)


class Inspected(Program):
    """Shows everything that it is given."""

    name = "inspected"
    command = ("sh", "-c", 'env; pwd; ls -a; cat; cat "$ROLLOUT_TASK_FILE"; ls "$HOME" "$TMPDIR"; echo "$1" >&2', "sh")
    stdin = "{task}|{workdir}|{directory}|{uid}|{base_url}|{model}|{key}"
    environment = {"MINE": "{key}", "ANTHROPIC_API_KEY": "", "LITERAL": '{"a": {}} ${task}'}  # noqa: RUF012

    def __init__(self, **options: Any) -> None:
        super().__init__([*self.command, "{task} {task_file}"], **options)
        self.seen: dict[str, Any] = {}

    def setup(self, run: Run) -> None:
        """Add a file to the working directory."""
        (run.state["workdir"] / "added").touch()

    def reward(self, run: Run) -> RewardResult:
        """Keep what is there for a reward."""
        self.seen = {**run.state, "files": sorted(path.name for path in run.state["workdir"].iterdir())}
        return RewardResult(0.5, {"files": 1.0})


def test_what_a_program_is_given(
    serving: Serving, scripted_model: ScriptedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scratch: Path
) -> None:
    monkeypatch.setenv("ROLLOUT_UNUSED_SECRET", "hunter2")
    template = tmp_path / "template"
    (template / "inside").mkdir(parents=True)
    (template / "link").symlink_to("nowhere")
    agent = Inspected(template=template)
    stack = serving(agent)
    task = "Do {uid}; $(exit) \"now\"\n'é' {task}"
    rollout = stack.play(
        [{"role": "user", "content": "old"}, {"role": "user", "content": task}], scripted_model.says("-")
    )
    assert (rollout.failure, rollout.stop, rollout.reward, rollout.scores) == (None, "stop", 0.5, {"files": 1.0})
    result, workdir = agent.seen["program"], agent.seen["workdir"]
    variables = dict(line.split("=", 1) for line in result.stdout.splitlines() if "=" in line)
    base_url, directory = f"http://127.0.0.1:{stack.http_port}/r/{rollout.uid}", workdir.parent
    assert (result.exit_code, result.stderr) == (0, f"{task} {directory}/task.txt\n")
    assert "hunter2" not in result.stdout
    assert {name: variables[name] for name in variables if name.startswith(("OPENAI", "ANTHROPIC", "ROLLOUT"))} == {
        "OPENAI_BASE_URL": f"{base_url}/v1",
        "OPENAI_API_KEY": "KEY",  # the key itself is in no output
        "ANTHROPIC_BASE_URL": base_url,
        "ANTHROPIC_API_KEY": "",
        "ROLLOUT_UID": rollout.uid,
        "ROLLOUT_ID": variables["ROLLOUT_ID"],
        "ROLLOUT_MODEL": "rollout",
        "ROLLOUT_MCP_URL": f"{base_url}/mcp",
        "ROLLOUT_TASK_FILE": f"{directory}/task.txt",
    }
    assert (variables["MINE"], variables["LITERAL"]) == ("KEY", '{"a": {}} ${task}')
    assert (variables["HOME"], variables["TMPDIR"]) == (f"{directory}/home", f"{directory}/tmp")
    filled = f"{task}|{workdir}|{directory}|{rollout.uid}|{base_url}|rollout|KEY{task}"
    assert f"\n{workdir}\n" in result.stdout
    assert filled in result.stdout
    assert agent.seen["files"] == ["added", "inside", "link"]
    assert directory.parent == scratch


NESTED = 'import os\nfor _ in range(1500): os.mkdir("d"); os.chdir("d")'
"""Nests directories deeper than Python's recursion goes."""


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo lost >&2; exit 3", "the program ended with exit code 3: lost"),
        ("echo out; exit 1", "the program ended with exit code 1: out"),
        ("kill -KILL $$", "the program ended with exit code -9: it wrote nothing"),
        ("env; exit 1", "OPENAI_API_KEY=KEY"),
        (f"{sys.executable} -ISc '{NESTED}'; exit 5", "exit code 5"),
        ("echo '{' > reward.json", "the program's reward file reward.json is invalid"),
        ("echo '{\"points\": 1}' > reward.json", "'points' is none of reward, scores, extra"),
        ("echo NaN > reward.json", "the program's reward file reward.json is invalid"),
        ("mkfifo reward.json", "reward.json cannot be read: it is not a regular file"),
        ("ln -s /etc/passwd reward.json", "reward.json cannot be read"),
        ("head -c 3000000 /dev/zero | tr '\\0' 1 > reward.json", "it is longer than 1,048,576 characters"),
    ],
)
def test_programs_that_fail(serving: Serving, scripted_model: ScriptedModel, script: str, message: str) -> None:
    agent = Program(["sh", "-c", script], name="failing", reward_file="reward.json")
    rollout = serving(agent).play("?", scripted_model.says("-"))
    assert rollout.failure is not None
    assert message in rollout.failure
    assert rollout.reward is None
    (ended,) = (event.finished.outcome for event in rollout.events if event.HasField("finished"))
    assert ended.failure.failure_class == 2  # ENVIRONMENT


def test_a_program_that_does_not_exist(serving: Serving, scripted_model: ScriptedModel) -> None:
    rollout = serving(Program(["no-such-agent"], name="failing")).play("?", scripted_model.says("-"))
    assert "could not be executed: [Errno 2] No such file or directory" in str(rollout.failure)
    long = serving(Program(["echo", "{task}"], name="failing")).play("x" * 200_000, scripted_model)
    assert "could not be started: Argument list too long" in str(long.failure)


def correct(run: Run) -> float:
    return 2.0


@pytest.mark.parametrize(
    ("script", "options", "reward"),
    [
        ("echo 0.5 > reward.json", {}, 0.5),
        ("echo 0.5 > reward.json", {"rubric": Rubric(funcs=[correct])}, 0.5),
        ("echo 0.5 > reward.json", {"rubric": Rubric(funcs=[correct]), "reward_file": ""}, 2.0),
        ("true", {"rubric": Rubric(funcs=[correct])}, 2.0),
        ("true", {}, None),
        ("exit 7", {"exit_codes": (0, 7)}, None),
    ],
)
def test_rewards(
    serving: Serving, scripted_model: ScriptedModel, script: str, options: dict[str, Any], reward: float | None
) -> None:
    agent = Program(["sh", "-c", script], **{"name": "rewarded", "reward_file": "reward.json", **options})
    rollout = serving(agent).play("?", scripted_model.says("-"))
    assert (rollout.failure, rollout.reward) == (None, reward)


def test_scores_of_both(serving: Serving, scripted_model: ScriptedModel) -> None:
    script = """echo '{"scores": {"tests": 0.5}, "extra": {"files": 3}}' > "$ROLLOUT_REWARD_FILE" """
    agent = Program(["sh", "-c", script], name="a", reward_file="sub.json", rubric=Rubric(funcs=[correct]))
    rollout = serving(agent).play("?", scripted_model.says("-"))
    assert (rollout.reward, rollout.scores) == (2.0, {"correct": 2.0, "tests": 0.5})


def test_a_prefix(serving: Serving, two: ScriptedModel) -> None:
    rollout = serving(looping(prefix=("env", "EXTRA={uid}", "nice"))).play("2 + 2?", two)
    assert (rollout.failure, len(rollout.samples)) == (None, 1)


ENDLESS = LOOP.replace("print(", "while True: messages.append(ask(messages + [{'role': 'user', 'content': 'On?'}])) #")


@pytest.mark.parametrize("stays", [False, True], ids=["ends", "stays"])
def test_a_limit_ends_a_program(serving: Serving, scripted_model: ScriptedModel, stays: bool) -> None:
    """The program is refused its next call. One that stays is ended before the reward is computed."""
    script = f'trap \'\' TERM; {sys.executable} -ISc "$0" "$1"; {"while :; do sleep 1000; done" if stays else "exit 1"}'
    left: list[Any] = []

    class Limited(Program):
        name = "limited"

        def reward(self, run: Run) -> float:
            """Look for processes of the program."""
            left.extend(processes_in(run.state["workdir"]))
            left.append(run.state["program"].exit_code)
            return 1.0

    agent = Limited(["sh", "-c", script, ENDLESS, "{task}"], limits=Limits(turns=2))
    for _ in range(5):
        scripted_model.says("On.")
    rollout = serving(agent).play("Go on.", scripted_model)
    assert (rollout.failure, rollout.stop, rollout.reward) == (None, "max_turns", 1.0)
    assert left == [None if stays else 1]


DAEMON = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True: time.sleep(1000)
    os._exit(0)
os.wait()
while True: os.write(1, b"flood" * 10000)
"""


@pytest.mark.parametrize("way", ["limit", "cancelled", "stopped"])
def test_a_program_that_will_not_end(serving: Serving, scripted_model: ScriptedModel, way: str, scratch: Path) -> None:
    """It forks, floods its output and ignores SIGTERM. The fixture checks that nothing of it is left."""
    stack = serving(Program([*PYTHON, DAEMON], name="never"))
    target = Target(f"grpc://{stack.trainer.grpc_target}", "grpc")
    fields: dict[str, Any] = {"limits": {"time": 1.5}} if way == "limit" else {}
    started = stack.client.start(
        messages=[{"role": "user", "content": "?"}], completions=target, tokenizer="toy", **fields
    )
    while len(list(processes_in(scratch))) < 3:
        threading.Event().wait(0.01)
    if way == "cancelled":
        stack.client.cancel(uids=[started.uid])
    if way == "stopped":
        stack.__exit__(None, None, None)
        return
    outcome = stack.client.wait(started.uid).outcome
    assert (outcome.HasField("cancellation"), outcome.HasField("failure")) == (way == "cancelled", way == "limit")
    while list(processes_in(scratch)) or any(scratch.glob("*/work")):
        threading.Event().wait(0.01)


def test_directories_of_servers_that_were_killed_are_removed(
    serving: Serving, two: ScriptedModel, scratch: Path
) -> None:
    """Not those whose server lives, and whatever else is there."""
    for name in ("rollout-program-left", "rollout-program-used", "rollout-program-new", "rollout-of-mine"):
        (scratch / name / "work").mkdir(parents=True)
        if "new" not in name:
            os.utime(scratch / name, (1, 1))
    descriptor = os.open(scratch / "rollout-program-used", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    program._remove_left.cache_clear()
    assert serving(looping()).play("2 + 2?", two).failure is None
    os.close(descriptor)
    left = ["rollout-of-mine", "rollout-program-new", "rollout-program-used"]
    assert sorted(path.parent.name for path in scratch.glob("*/work")) == left
    for name in left:
        shutil.rmtree(scratch / name)


def test_many_programs_at_once(serving: Serving, two: ScriptedModel) -> None:
    stack = serving(looping())
    found: list[FinishedRollout] = []
    threads = [threading.Thread(target=lambda: found.append(stack.play("2 + 2?", two))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(each.failure, len(each.samples)) for each in found] == [(None, 1)] * 8
    assert all(tokens(each) == tokens(found[0]) for each in found)


@own_loop
async def fails(http: httpx.AsyncClient, run: Run) -> str:
    """Returns what is no reward, or raises."""
    if run.metadata.get("raises"):
        raise LookupError("hunter2")
    return "good"


def test_functions_that_fail(serving: Serving, scripted_model: ScriptedModel, caplog: pytest.LogCaptureFixture) -> None:
    stack = serving(fails)
    for metadata, text in (({"raises": True}, "LookupError"), ({}, "its function returned 'good'; it must return")):
        rollout = stack.play("?", scripted_model.says("-"), metadata=metadata)
        assert "play failed" in str(rollout.failure)
        assert text in caplog.text


def test_a_server_without_http(serving: Serving, two: ScriptedModel) -> None:
    rollout = serving(asks_twice, http=False).play("?", two)
    assert "the server has no HTTP port; switch it on or set ROLLOUT_PUBLIC_URL" in str(rollout.failure)


class Remote(ExternalAgent):
    """Works elsewhere."""

    name = "remote"

    def reward(self, run: Run) -> RewardResult:
        """Read what the agent gave."""
        return RewardResult(0.1, {"own": 1.0, "given": float("result" in run.state)})


class Elsewhere:
    """An agent in another program, as its harness starts it."""

    def __init__(self, stack: LocalStack, model: ScriptedModel, **fields: Any) -> None:
        self.client = stack.client
        stack._loop.run(stack.trainer.put_script("elsewhere", model.script))
        target = Target(f"grpc://{stack.trainer.grpc_target}", "grpc", replays_turn_keys=True)
        question = [{"role": "user", "content": "2 + 2?"}]
        self.started = stack.client.start(
            messages=question,
            rollout_id="elsewhere",
            completions=target,
            tokenizer="toy",
            token_mode="tokens",
            **fields,
        )
        access = self.started.access
        assert access is not None
        self.environment = {
            "OPENAI_BASE_URL": f"{access.base_url}/v1",
            "OPENAI_API_KEY": access.key,
            "ROLLOUT_MODEL": "any",
        }
        self.http = httpx.Client(base_url=access.base_url, headers={"authorization": f"Bearer {access.key}"})

    def work(self) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([*PYTHON, LOOP, "2 + 2?"], env=self.environment, check=False, capture_output=True)

    def outcome(self) -> Any:
        return self.client.wait(self.started.uid, view="samples").outcome


def test_an_agent_elsewhere(serving: Serving, two: ScriptedModel) -> None:
    remote = Elsewhere(serving(Remote()), two)
    played = serving(Played()).play("2 + 2?", two)
    assert remote.work().stdout == b"Yes, it is.\n"
    finished = [remote.http.post("/finish", json={"reward": 1.5, "scores": {"tests": 0.5}}) for _ in range(2)]
    assert [(each.status_code, each.json()["repeated"]) for each in finished] == [(200, False), (200, True)]
    outcome = remote.outcome()
    assert (outcome.reward, dict(outcome.scores), outcome.stop.reason) == (1.5, {"tests": 0.5}, "stop")
    assert [each.response_ids for each in samples(outcome)] == [each.response_ids for each in played.samples]
    assert remote.http.post("/finish", json={"reward": 2}).status_code == 409
    assert remote.work().returncode == 1


def test_the_class_computes_the_reward_of_an_agent_elsewhere(serving: Serving, two: ScriptedModel) -> None:
    remote = Elsewhere(serving(Remote()), two)
    remote.work()
    remote.http.post("/finish", json={"scores": {"tests": 0.5}}).raise_for_status()
    outcome = remote.outcome()
    assert (outcome.reward, dict(outcome.scores)) == (0.1, {"own": 1.0, "given": 1.0, "tests": 0.5})


def test_an_agent_elsewhere_that_fails(serving: Serving, two: ScriptedModel) -> None:
    remote = Elsewhere(serving(Remote()), two)
    remote.http.post("/finish", json={"failure": {"message": "no disk"}}).raise_for_status()
    outcome = remote.outcome()
    assert (outcome.failure.message, outcome.failure.failure_class) == ("no disk", 2)


def test_an_agent_elsewhere_that_goes_silent(serving: Serving, two: ScriptedModel) -> None:
    remote = Elsewhere(serving(Remote(idle_seconds=0.5)), two)
    failure = remote.outcome().failure
    assert "neither called its model or a tool nor finished for 0.5 s" in failure.message
    assert failure.failure_class == 2


def test_an_agent_elsewhere_is_graded_after_a_limit(serving: Serving, two: ScriptedModel) -> None:
    remote = Elsewhere(serving(Remote()), two, limits={"turns": 1})
    assert b"HTTP Error 410" in remote.work().stderr
    finished = [remote.http.post("/finish", json={"reward": 0.75}) for _ in range(2)]
    assert [(each.status_code, each.json()["repeated"]) for each in finished] == [(200, False), (200, True)]
    outcome = remote.outcome()
    assert (outcome.stop.reason, outcome.reward) == ("max_turns", 0.75)


def test_an_agent_elsewhere_goes_silent_after_a_limit(serving: Serving, two: ScriptedModel) -> None:
    remote = Elsewhere(serving(Remote(idle_seconds=0.5)), two, limits={"turns": 1})
    assert b"HTTP Error 410" in remote.work().stderr
    outcome = remote.outcome()
    assert (outcome.stop.reason, outcome.reward) == ("max_turns", 0.1)
    late = remote.http.post("/finish", json={"reward": 0.75})
    assert (late.status_code, late.json()["error"]["code"]) == (400, "ROLLOUT_OVER")


def test_an_agent_elsewhere_fails_after_a_limit(serving: Serving, two: ScriptedModel) -> None:
    remote = Elsewhere(serving(Remote()), two, limits={"turns": 1})
    remote.work()
    remote.http.post("/finish", json={"failure": {"message": "no disk"}}).raise_for_status()
    assert remote.outcome().failure.message == "no disk"


def test_commands_refuse_what_they_cannot_run(tmp_path: Path) -> None:
    (tmp_path / "remote.py").write_text(
        'from rollout_server import ExternalAgent\n\nagent = ExternalAgent(name="far")\n'
    )
    run = [sys.executable, "-m", "rollout_server.cli"]
    refused = subprocess.run(
        [*run, "run", "remote.py", "--prompt", "?"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert refused.returncode == 1
    assert "agent 'far' runs elsewhere, so this command cannot run it" in refused.stderr
    valid = subprocess.run(
        [*run, "validate", "remote.py", "--json"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    [report] = json.loads(valid.stdout)["agents"]
    assert (valid.returncode, report["valid"]) == (0, True)
    assert "it runs elsewhere, so there was no dry run" in report["advice"]
