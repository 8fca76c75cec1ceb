"""`rollout ps`, `watch`, `cancel`, `start` and `inspect` beside a running server."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_client import AsyncClient
from rollout_server import ExternalAgent, Run
from rollout_server.app import Server
from rollout_server.calculator import Calculator
from rollout_server.core.message import JSON
from rollout_server.runtime.ports import Content, Tool
from rollout_server.testing.script import Script, ScriptedReply, tool_call
from rollout_server.testing.trainer import StrictTrainer
from typer.testing import Result

from tests.cli.conftest import Invoke, complaint, document
from tests.support.calculator_tools import calculator_tools
from tests.support.processes import COMMAND, environment
from tests.support.start_requests import settings

TOY = ("--tokenizer", "toy=toy")
ADD = (tool_call("c1", "add", '{"a": 5, "b": 3}'),)
MULTIPLY = (tool_call("c2", "multiply", '{"a": 8, "b": 2}'),)
SCRIPTS = {
    "plain": Script((ScriptedReply(content="Adding.", tool_calls=ADD), ScriptedReply(content="#### 8"))),
    "cut": Script((ScriptedReply(content="Adding.", tool_calls=ADD, cut=True), ScriptedReply(content="#### 8"))),
    "drift": Script(
        (ScriptedReply(content="Adding.", tool_calls=ADD, surplus=(5, 6, 7)), ScriptedReply(content="#### 8"))
    ),
    "long": Script(
        (
            ScriptedReply(tool_calls=ADD),
            ScriptedReply(tool_calls=MULTIPLY, surplus=(5, 6, 7)),
            ScriptedReply(content="#### 16"),
        )
    ),
}
COMMANDS = {
    "ps": ("ps",),
    "watch": ("watch", "u1"),
    "cancel": ("cancel", "u1"),
    "start": ("start", "--prompt", "a", "--completions", "grpc://127.0.0.1:9"),
}


@dataclass
class Gate:
    """A point that a rollout reaches and where it waits for the test."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    opened: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self) -> None:
        """Wait until the test opens the gate."""
        self.reached.set()
        await self.opened.wait()


class Held(Calculator):
    """The calculator, which waits before it computes the reward."""

    name = "held"

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    async def reward(self, run: Run) -> float | None:
        """Compute the reward once the gate is open."""
        await self.gate.wait()
        return await super().reward(run)


@dataclass(frozen=True)
class HeldTool:
    """A tool that waits before it returns."""

    tool: Tool
    gate: Gate

    @property
    def name(self) -> str:
        return self.tool.name

    @property
    def description(self) -> str:
        return self.tool.description

    @property
    def parameters_json_schema(self) -> str:
        return self.tool.parameters_json_schema

    async def run(self, arguments: Mapping[str, JSON]) -> Content:
        await self.gate.wait()
        return await self.tool.run(arguments)


class Halfway(Calculator):
    """The calculator, which waits in its tools."""

    name = "halfway"

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()
        self.tools = tuple(HeldTool(tool, self.gate) for tool in self.tools)


@dataclass(frozen=True)
class Beside:
    """A running server with its agents, a trainer, and commands beside it."""

    server: Server
    trainer: StrictTrainer
    client: AsyncClient
    held: Held
    halfway: Halfway
    invoke: Invoke

    @property
    def address(self) -> str:
        """The server's gRPC address."""
        return f"127.0.0.1:{self.server.grpc_port}"

    async def start(self, name: str, script: str = "plain", **fields: Any) -> str:
        """Start a rollout with a script and return its uid."""
        await self.trainer.put_script(name, SCRIPTS[script])
        values = {"messages": [{"role": "user", "content": "Go."}], "metadata": {"ground_truth": "8"}, **fields}
        started = await self.client.start(
            completions=self.trainer.url, tokenizer="toy", rollout_id=name, request_id=name, **values
        )
        return started.uid

    async def finish(self, name: str, script: str = "plain", **fields: Any) -> str:
        """Run a rollout to its end and return its uid."""
        uid = await self.start(name, script, **fields)
        await self.client.wait(uid, timeout=60)
        return uid

    async def held_rollout(self, name: str, script: str = "plain", **fields: Any) -> str:
        """Start a rollout and return its uid when it has all turns and waits for its reward."""
        uid = await self.start(name, script, agent="held", **fields)
        await self.held.gate.reached.wait()
        return uid

    async def run(self, *arguments: str, **env: str) -> Result:
        """Run a command in a thread."""
        return await asyncio.to_thread(self.invoke, *arguments, "--server", self.address, **env)

    async def rest(self, path: str) -> Any:
        """The JSON of a REST route."""
        async with httpx.AsyncClient(trust_env=False) as http:
            return (await http.get(f"http://127.0.0.1:{self.server.http_port}/v1/rollouts{path}")).json()


@pytest.fixture
async def beside(invoke: Invoke) -> AsyncIterator[Beside]:
    """A real server and trainer in this event loop."""
    held, halfway = Held(), Halfway()
    async with (
        Server([Calculator(), held, halfway, ExternalAgent(name="elsewhere")], settings(http=True)) as server,
        StrictTrainer(tools=calculator_tools()) as trainer,
        AsyncClient(f"127.0.0.1:{server.grpc_port}") as client,
    ):
        yield Beside(server, trainer, client, held, halfway, invoke)
        held.gate.opened.set()
        halfway.gate.opened.set()


def lines(result: Result) -> list[dict[str, Any]]:
    """The JSON objects on standard output."""
    assert result.exit_code in (0, 1), result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


async def three(beside: Beside) -> list[str]:
    """A completed, a cancelled and a running rollout, oldest first."""
    done = await beside.finish("done", group_id="g1", labels={"run": "7", "by": "me"})
    gone = await beside.start("gone", agent="halfway", labels={"run": "7"})
    await beside.halfway.gate.reached.wait()
    await beside.client.cancel(gone, reason="no\x1b[2Jneed")
    await beside.client.wait(gone, timeout=60)
    return [done, gone, await beside.held_rollout("runs", group_id="g2", labels={"run": "8"})]


async def test_rollouts_are_listed_newest_first_with_state_and_result(beside: Beside) -> None:
    uids = await three(beside)
    told = await beside.run("ps")
    assert (told.exit_code, told.stderr) == (0, "")
    head, *rows = told.stdout.splitlines()
    assert head.split() == ["UID", "ROLLOUT", "ID", "AGENT", "STATE", "TURNS", "TOKENS", "AGE", "RESULT"]
    assert [row.split()[0] for row in rows] == uids[::-1]
    tokens = str((await beside.client.get(uids[2])).metrics.generated_tokens)
    assert rows[0].split()[1:6] == ["runs", "held", "running", "2", tokens]
    assert rows[0].split()[6][-1] in "sm"
    assert len(rows[0].split()) == 7
    assert rows[1].endswith("cancelled: no␛[2Jneed")
    assert rows[2].split()[1:4] == ["done", "calculator", "finished"]
    assert rows[2].endswith("reward 1")


async def test_a_failed_rollout_names_its_category(beside: Beside) -> None:
    nowhere = f"{beside.trainer.url}/nowhere"
    message = {"role": "user", "content": "a"}
    started = await beside.client.start(messages=[message], completions=nowhere, tokenizer="toy")
    await beside.client.wait(started.uid, timeout=60)
    assert (await beside.run("ps")).stdout.rstrip().endswith("failed: trainer_client")


async def test_listed_rollouts_are_those_of_the_rest_api(beside: Beside) -> None:
    await three(beside)
    assert lines(await beside.run("ps", "--json")) == (await beside.rest(""))["rollouts"]


FILTERS = {
    "state": (("--state", "running"), ["runs"]),
    "states": (("--state", "running", "--state", "queued"), ["runs"]),
    "finished": (("--state", "finished"), ["gone", "done"]),
    "agent": (("--agent", "calculator"), ["done"]),
    "group": (("--group", "g2"), ["runs"]),
    "label": (("--label", "run=7"), ["gone", "done"]),
    "labels": (("--label", "run=7", "--label", "by=me"), ["done"]),
    "together": (("--label", "run=7", "--agent", "held"), []),
    "limit": (("--limit", "2"), ["runs", "gone"]),
}


async def test_conditions_select_rollouts(beside: Beside) -> None:
    await three(beside)
    for flags, names in FILTERS.values():
        told = await beside.run("ps", *flags, "--json")
        assert [each["spec"]["rollout_id"] for each in lines(told)] == names, flags
        assert ("there are more than 2" in told.stderr) == ("--limit" in flags)


WRONG_CONDITIONS = [("--state", "asleep"), ("--label", "run"), ("--label", "=7"), ("--limit", "0")]


@pytest.mark.parametrize("flags", [*WRONG_CONDITIONS, ("--label", "run=7", "--label", "run=8")])
def test_a_wrong_condition_is_a_wrong_command_line(invoke: Invoke, flags: tuple[str, ...]) -> None:
    told = invoke("ps", *flags, "--json")
    assert (told.exit_code, document(told)["error"]["kind"]) == (2, "usage")


async def test_a_running_rollout_is_watched_to_its_end(beside: Beside) -> None:
    uid = await beside.start("r", agent="halfway")
    await beside.halfway.gate.reached.wait()
    watching = asyncio.create_task(beside.run("watch", uid))
    beside.halfway.gate.opened.set()
    told = await watching
    assert told.exit_code == 0, told.output
    for text in (
        f"rollout {uid}, agent halfway",
        "user      │ Go.",
        'assistant │ calls add {"a": 5, "b": 3}',
        "tool      │ add, ",
        "assistant │ #### 8",
        "completed: stop",
        "2 turns, 1 tool call (0 failed)",
        "reward 1",
    ):
        assert text in told.stdout
    assert "authors unknown" not in told.stdout


async def test_watched_events_are_those_of_the_rest_api(beside: Beside) -> None:
    uid = await beside.finish("r")
    events = lines(await beside.run("watch", uid, "--json"))
    assert [event["sequence"] for event in events] == list(range(1, len(events) + 1))
    assert (events[-1]["event"], events[-1]["outcome"]["reward"]) == ("finished", 1.0)
    assert "segments" not in events[-1]["outcome"]
    assert [event["message"]["content"] for event in events if event["event"] == "answered"] == ["Adding.", "#### 8"]
    assert lines(await beside.run("watch", uid, "--json", "--after", "3")) == events[3:]


async def test_a_finished_rollout_is_told_without_its_events(beside: Beside) -> None:
    uid = await beside.finish("r")
    last = (await beside.client.get(uid)).last_sequence
    told = await beside.run("watch", uid, "--after", str(last))
    assert told.exit_code == 0
    assert "reward 1" in told.stdout
    assert "│" not in told.stdout
    beyond = await beside.run("watch", uid, "--after", str(last + 1))
    assert "there is no event" in complaint(beyond)


async def test_the_exit_code_tells_whether_it_completed(beside: Beside) -> None:
    _, gone, _ = await three(beside)
    told = await beside.run("watch", gone)
    assert told.exit_code == 1
    assert "cancelled: no␛[2Jneed" in told.stdout


@pytest.mark.parametrize(
    ("fields", "said"),
    [({}, "the rollout continues"), ({"cancel_after_detach": 60}, "after 60 s (cancel_after_detach)")],
)
async def test_ctrl_c_stops_watching_and_nothing_else(
    beside: Beside, here: Path, fields: dict[str, Any], said: str
) -> None:
    uid = await beside.held_rollout("r", **fields)
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *("watch", uid, "--server", beside.address),
        cwd=here,
        env=environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        while "#### 8" not in (await process.stdout.readline()).decode():
            assert process.returncode is None
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 130
    assert err.decode().startswith("rollout watch: stopped watching; ")
    assert said in err.decode()
    assert (await beside.client.get(uid)).state == pb.ROLLOUT_STATE_RUNNING


async def test_rollouts_are_cancelled_by_uid_with_a_reason(beside: Beside) -> None:
    uid, other = await beside.held_rollout("r"), await beside.finish("s")
    told = await beside.run("cancel", uid, other, "--reason", "too slow")
    assert (told.exit_code, told.stdout, told.stderr) == (0, f"{uid}\n", "")
    outcome = (await beside.client.wait(uid, timeout=60)).outcome
    assert outcome.cancellation.reason == "too slow"
    again = await beside.run("cancel", uid)
    assert (again.exit_code, again.stdout) == (0, "")
    assert "no rollout was cancelled" in again.stderr
    assert "ROLLOUT_NOT_FOUND" in complaint(await beside.run("cancel", "nobody"))


async def test_rollouts_are_cancelled_by_condition(beside: Beside) -> None:
    uids = {name: await beside.held_rollout(name, labels={"run": name[0]}) for name in ("a1", "a2", "b1", "b2")}
    told = await beside.run("cancel", "--label", "run=a", "--json")
    assert set(document(told)["uids"]) == {uids["a1"], uids["a2"]}
    one = await beside.run("cancel", uids["b1"], "--label", "run=c")
    assert one.stdout == ""
    both = await beside.run("cancel", "--all")
    assert set(both.stdout.split()) == {uids["b1"], uids["b2"]}


def test_a_cancellation_selects_something(invoke: Invoke) -> None:
    told = invoke("cancel")
    assert told.exit_code == 2
    assert "nothing is selected" in told.stderr
    assert document(invoke("cancel", "--json"))["error"]["kind"] == "usage"


def starting(beside: Beside, *flags: str) -> tuple[str, ...]:
    """The command that starts a rollout at the trainer."""
    target = ("--completions", beside.trainer.url, "--dialect", "http-masked", "--tokenizer", "toy")
    return ("start", "--prompt", "Please calculate 5 plus 3, then multiply by 2.", *target, *flags)


async def test_a_started_rollout_continues_without_the_command(beside: Beside) -> None:
    more = ("--agent", "held", "--label", "run=7", "--metadata", '{"a": 1}', "--ground-truth", "8", "--turns", "5")
    told = await beside.run(*starting(beside, *more, "--system", "Be brief.", "--temperature", "0.5"))
    assert (told.exit_code, told.stderr) == (0, "")
    beside.held.gate.opened.set()
    rollout = await beside.client.wait(told.stdout.strip(), timeout=60, view="messages")
    spec = rollout.spec
    assert rollout.outcome.HasField("stop"), rollout.outcome
    assert (spec.agent, dict(spec.labels), spec.limits.turns) == ("held", {"run": "7"}, 5)
    assert json.loads(spec.metadata_json) == {"a": 1, "ground_truth": "8"}
    assert spec.sampling.temperature == 0.5
    assert [json.loads(message.json)["role"] for message in spec.messages] == ["system", "user"]


async def test_a_started_rollout_is_watched(beside: Beside) -> None:
    told = await beside.run(*starting(beside, "--watch"))
    assert told.exit_code == 0, told.output
    uid, title, *_ = told.stdout.splitlines()
    assert title.startswith(f"rollout {uid}, agent calculator")
    assert "completed: stop" in told.stdout
    rollout, *events = lines(await beside.run(*starting(beside, "--watch", "--json")))
    assert (rollout["spec"]["agent"], rollout["outcome"]) == ("calculator", None)
    assert [event["event"] for event in events][:: len(events) - 1] == ["accepted", "finished"]
    cut = await beside.run(*starting(beside, "--watch", "--agent", "nobody"))
    assert "nobody" in complaint(cut)


async def test_a_started_rollout_of_an_agent_that_runs_elsewhere_shows_its_access(beside: Beside) -> None:
    told = await beside.run(*starting(beside, "--agent", "elsewhere"))
    uid = told.stdout.strip()
    access = await beside.client.access(uid)
    assert access is not None
    assert told.stderr == f"The agent's model endpoint: base URL {access.base_url}, key {access.key}\n"
    await beside.client.finish(uid, access.key, reward=1.0)
    (rollout,) = lines(await beside.run(*starting(beside, "--agent", "elsewhere", "--json")))
    access = await beside.client.access(rollout["uid"])
    assert access is not None
    assert rollout["access"] == {"base_url": access.base_url, "key": access.key}
    await beside.client.finish(rollout["uid"], access.key, reward=1.0)


async def test_a_group_is_started_watched_and_cancelled(beside: Beside) -> None:
    told = await beside.run(*starting(beside, "--group", "3", "--watch"))
    assert told.exit_code == 0, told.output
    group_id, *rollouts, result = told.stdout.splitlines()
    members = (await beside.client.get_group(group_id)).members
    assert sorted(rollouts) == [f"rollout {each.index}  {each.uid}  stop" for each in members]
    assert result == "3 of 3 rollouts are usable: 3 completed, 0 failed, 0 cancelled; 0 started anew"
    group, *outcomes, last = lines(await beside.run(*starting(beside, "--group", "3", "--watch", "--json")))
    assert [each["event"] for each in (*outcomes, last)] == ["outcome"] * 3 + ["result"]
    async with httpx.AsyncClient(trust_env=False) as http:
        shown = (await http.get(f"http://127.0.0.1:{beside.server.http_port}/v1/groups/{group['group_id']}")).json()
    assert {**last, "sequence": 4, "event": "result"} == {**shown["result"], "sequence": 4, "event": "result"}
    assert (shown["group_id"], len(shown["members"]), group["result"]) == (group["group_id"], 3, None)
    held = await beside.run(*starting(beside, "--group", "2", "--agent", "held", "--refill", "1", "--min-usable", "2"))
    assert held.exit_code == 0
    cancelled = await beside.run("cancel", "--group", held.stdout.strip())
    assert len(cancelled.stdout.split()) == 2
    async for outcome in beside.client.watch_group(held.stdout.strip()):
        assert outcome.rollout.outcome.HasField("cancellation")
    nowhere = ("start", "--prompt", "a", "--completions", "http://127.0.0.1:9", "--dialect", "http-masked")
    failed = await beside.run(*nowhere, "--tokenizer", "toy", "--group", "1", "--refill", "1", "--watch")
    assert failed.exit_code == 1
    assert failed.stdout.count("; started anew") == 1
    assert "0 of 1 rollouts are usable" in failed.stdout


def test_flags_of_a_group_need_one(invoke: Invoke) -> None:
    told = invoke("start", "--prompt", "a", "--completions", "http://127.0.0.1:9", "--refill", "2")
    assert told.exit_code == 2
    assert "--group" in told.stderr


WRONG = {
    "prompt": (("--message", "gone.json"), "exactly one of --prompt TEXT and --message FILE"),
    "directory": (("--tokenizer", "toy=toy"), "leave out the directory"),
    "metadata": (("--metadata", "["), "--metadata is not JSON"),
    "scheme": (("--completions", "localhost:1"), "--completions must begin with http://"),
    "model": (("--dialect", "vllm"), "--dialect vllm needs --model NAME"),
}


@pytest.mark.parametrize(("flags", "said"), WRONG.values(), ids=WRONG.keys())
def test_what_cannot_start_is_told_before_the_server_is_called(
    invoke: Invoke, flags: tuple[str, ...], said: str
) -> None:
    told = invoke("start", "--prompt", "a", "--completions", "http://127.0.0.1:9", "--model", "m", *flags)
    if "vllm" in flags:
        told = invoke("start", "--prompt", "a", "--completions", "http://127.0.0.1:9", *flags)
    assert said in complaint(told)


def test_completions_are_required(invoke: Invoke) -> None:
    told = invoke("start", "--prompt", "a")
    assert told.exit_code == 2
    assert "--completions" in told.stderr


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS.keys())
def test_a_server_that_is_not_there_is_told_in_one_line(invoke: Invoke, command: tuple[str, ...]) -> None:
    told = invoke(*command, "--server", "127.0.0.1:9")
    assert (told.exit_code, told.stdout) == (1, "")
    assert "UNAVAILABLE" in told.stderr
    assert "is this its gRPC port (default 50051), not its HTTP port (default 9000)?" in told.stderr
    assert len(told.stderr.splitlines()) == 1


def without_texts(segment: dict[str, Any]) -> dict[str, Any]:
    """A segment of `rollout inspect --json` without the texts of its drifts."""
    return {**segment, "drifts": [{**drift, "message": ""} for drift in segment["drifts"]]}


@pytest.mark.parametrize("script", SCRIPTS)
async def test_a_running_rollout_is_inspected_token_by_token(beside: Beside, script: str) -> None:
    uid = await beside.held_rollout("r", script)
    running = document(await beside.run("inspect", uid, *TOY, "--json"))
    assert (running["end"], running["reward"]) == (None, None)
    turns = len([event for event in running["segments"] for run in event["runs"] if run["letter"] == "M"])
    assert running["ending"].startswith(f"still runs (turns so far: {turns}, generated tokens: ")
    beside.held.gate.opened.set()
    await beside.client.wait(uid, timeout=60)
    finished = document(await beside.run("inspect", uid, *TOY, "--json"))
    assert list(map(without_texts, running["segments"])) == list(map(without_texts, finished["segments"]))
    assert finished["end"] == "stop"


async def test_a_rollout_is_inspected_in_the_middle_of_a_turn(beside: Beside) -> None:
    uid = await beside.start("r", agent="halfway")
    await beside.halfway.gate.reached.wait()
    told = await beside.run("inspect", uid, *TOY)
    assert (told.exit_code, told.stderr) == (0, "")
    assert "still runs (turns so far: 1, " in told.stdout
    assert f"`rollout watch {uid}` follows it" in told.stdout
    assert {line[0] for line in told.stdout.splitlines() if "│" in line} == {"P", "M"}
    assert (await beside.client.get(uid)).state == pb.ROLLOUT_STATE_RUNNING


async def test_a_queued_rollout_is_inspected(invoke: Invoke) -> None:
    held = Held()
    async with (
        Server([held], settings(max_running=1)) as server,
        StrictTrainer(tools=calculator_tools()) as trainer,
        AsyncClient(f"127.0.0.1:{server.grpc_port}") as client,
    ):
        fields = {"messages": [{"role": "user", "content": "Go."}], "completions": trainer.url, "tokenizer": "toy"}
        await client.start(**fields)
        await held.gate.reached.wait()
        uid = (await client.start(**fields)).uid
        told = await asyncio.to_thread(invoke, "inspect", uid, "--server", f"127.0.0.1:{server.grpc_port}")
        held.gate.opened.set()
    assert told.exit_code == 0, told.output
    assert "waits in the queue (turns so far: 0, " in told.stdout
    assert "Go." in told.stdout
