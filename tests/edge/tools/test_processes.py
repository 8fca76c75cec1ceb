"""Tools in processes: their results, how they end, and that nothing of them remains."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from rollout_server import tool
from rollout_server.core.message import JSON, ToolCall
from rollout_server.core.outcome import Category, Failure
from rollout_server.edge.tools.pool import PoolLimits, ProcessPool
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.runtime.ports import Tool
from rollout_server.runtime.tools.executor import ToolExecutor, ToolResult
from rollout_server.runtime.tools.resources import ToolResources

from tests.edge.tools import offered

TOOLS = tuple(value for value in vars(offered).values() if hasattr(value, "policy"))


class Bench:
    """A tool executor with its own processes."""

    def __init__(self, limits: PoolLimits | None = None, tools: Sequence[Tool] = TOOLS) -> None:
        self.pool = ProcessPool(limits)
        self.bench = ToolResources(processes=self.pool)
        self.box = ToolExecutor(tools, self.bench)

    async def __call__(self, name: str, **arguments: JSON) -> ToolResult:
        return await self.box.run(ToolCall("c", name, json.dumps(arguments)))


@pytest.fixture
async def run() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    await bench.bench.close()
    assert bench.pool.alive == 0


def wait_until_gone(*numbers: int) -> None:
    """Wait until these processes do not exist. An unreaped child of this process still counts as existing."""
    for number in numbers:
        try:
            while True:
                state, parent, *_ = _status(number)
                if state == "Z" and int(parent) != os.getpid():  # the parent of orphans may leave them as zombies
                    break
                time.sleep(0.01)
        except OSError:
            continue


def _status(number: int) -> list[str]:
    return Path(f"/proc/{number}/stat").read_text(encoding="ascii").rpartition(")")[2].split()


def state_of(number: int) -> str:
    """The state R, S, T or Z, as shown by `ps`."""
    return _status(number)[0]


def parent_of(number: int) -> int:
    """The parent of a tool's process, which the server knows."""
    return int(_status(number)[1])


def numbers_in(path: Path) -> list[int]:
    """The process ids that a tool writes there, as soon as it has."""
    for _ in range(6000):
        if path.exists() and (text := path.read_text(encoding="ascii")):
            break
        time.sleep(0.01)
    else:
        raise TimeoutError("the tool did not begin")
    return [int(word) for word in text.split()]


async def gone(*numbers: int) -> None:
    """Wait without blocking the event loop."""
    await asyncio.to_thread(wait_until_gone, *numbers)


async def test_results_and_errors_are_those_of_any_tool(run: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    assert (await run("add", a=1, b=2)).content == "3"
    assert (
        await run("add", a=1, b="2")
    ).content == 'Error: Invalid arguments for add: b: must be a valid integer, not "2"'
    assert (await run("add_later", a=1, b=2)).content == "3"
    assert (await run("show")).content == offered.show.run_here({})
    assert "noise" not in "".join(capfd.readouterr())


async def test_a_process_is_used_again_and_a_fresh_one_is_not(run: Bench) -> None:
    first, second = [json.loads((await run("where")).text) for _ in range(2)]
    assert (first[0], first[1], second[1]) == (second[0], 1, 2)
    assert first[0] != os.getpid()
    first, second = [json.loads((await run("fresh")).text) for _ in range(2)]
    assert first[0] != second[0]
    assert (first[1], second[1]) == (1, 1)


ENDS = [
    ("system exit", "SystemExit: 4", "ended with SystemExit at "),
    ("key", "'key'", "ended with KeyError at "),
    ("tool error", "closed today", ""),
    ("group", "closed today", ""),
    ("unwritable", "The result of go_wrong cannot be written: ", "returned a value that cannot be written as text"),
    ("crash", "The tool's process was killed by SIGSEGV", "ended with SIGSEGV"),
    ("exit", "The tool's process exited with status 3", "ended with exit status 3"),
    ("junk", "The tool's process sent an invalid response", "ended with BadFrame"),
    ("too large", "The result of go_wrong cannot be sent: it has 60,000,026 bytes", ""),
]


async def test_however_a_call_ends_the_model_is_told_and_the_next_one_runs(
    run: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    for how, said, logged in ENDS:
        caplog.clear()
        told = await run("go_wrong", how=how)
        assert told.failed
        assert told.text.startswith(f"Error: {said}")
        messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        start = f"tool go_wrong ({offered.__file__}:{offered.go_wrong.definition.line}) {logged}"
        assert [message[: len(start)] for message in messages] == ([start] if logged else [])


async def test_what_a_fork_of_the_process_returns_is_nobodys_result(run: Bench) -> None:
    first, second = await run("double"), await run("double")
    assert (first.text, second.text) == ("parent", "parent")
    assert [(await run("add", a=number, b=1)).text for number in range(3)] == ["1", "2", "3"]


async def test_a_call_that_takes_too_long_is_killed_with_all_it_started(run: Bench, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    assert (await run("spawn_and_spin", marks=str(marks))).content == "Error: spawn_and_spin took longer than 1 s"
    await gone(*numbers_in(marks))


async def test_a_cancelled_call_is_killed(run: Bench, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    running = asyncio.create_task(run("spin", marks=str(marks)))
    (number,) = await asyncio.to_thread(numbers_in, marks)
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
    await gone(number)


async def test_closing_kills_what_runs_and_what_is_idle(tmp_path: Path) -> None:
    bench, marks = Bench(), tmp_path / "marks"
    running = asyncio.create_task(bench("spin", marks=str(marks)))
    numbers = [*await asyncio.to_thread(numbers_in, marks), json.loads((await bench("where")).text)[0]]
    await bench.bench.close()
    assert (await running).text == "Error: The tool's process was killed by SIGKILL"
    assert bench.pool.alive == 0
    await gone(*numbers)
    assert (await bench("where")).text == "Error: The server is stopping"


def test_a_process_ends_with_its_server(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    program = f"""
import asyncio
from tests.edge.tools.test_processes import Bench
asyncio.run(Bench()("spin", marks={str(marks)!r}))
"""
    server = subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parents[3])
    (number,) = numbers_in(marks)
    server.kill()
    server.wait()
    wait_until_gone(number)


async def test_limits_on_memory_and_processor(run: Bench) -> None:
    assert (await run("eat", size=1000)).content == "1000"
    assert (await run("eat", size=300_000_000)).content == "Error: MemoryError"
    assert (await run("eat", size=1000)).content == "1000"
    assert (await run("burn")).content == "Error: The tool's process exceeded its processor time"


async def test_retries_start_another_process(run: Bench, tmp_path: Path) -> None:
    assert (await run("crash_until", marks=str(tmp_path / "a"), times=1)).content == "1"
    assert (await run("crash_until", marks=str(tmp_path / "b"), times=3)).failed


async def test_there_are_no_more_processes_than_places() -> None:
    bench = Bench(PoolLimits(processes=1))
    results = await asyncio.gather(bench("add", a=1, b=2), bench("eat", size=3), bench("add_later", a=1, b=2))
    assert [result.content for result in results] == ["3"] * 3
    assert bench.pool.alive == 1
    await bench.bench.close()


async def test_of_two_processes_that_start_at_once_each_takes_the_place_of_an_idle_one() -> None:
    bench = Bench(PoolLimits(processes=2))
    counts = []
    try:
        for name in ("where", "fresh", "where"):
            results = await asyncio.gather(bench(name), bench(name))
            counts.append([json.loads(result.text)[1] for result in results])
    finally:
        await bench.bench.close()
    assert counts == [[1, 1]] * 3  # a process that was kept would have counted further


async def test_an_idle_process_ends_after_a_while() -> None:
    bench = Bench(PoolLimits(idle_seconds=0.01))
    await gone(json.loads((await bench("where")).text)[0])
    await bench.bench.close()


async def test_a_process_that_died_while_it_was_idle_is_replaced(run: Bench) -> None:
    number = json.loads((await run("where")).text)[0]
    supervisor = parent_of(number)
    os.kill(number, 9)
    await gone(number, supervisor)
    assert json.loads((await run("where")).text)[0] != number


def test_a_process_gets_the_variables_that_it_needs_and_those_that_its_tool_names() -> None:
    program = """
import asyncio
from tests.edge.tools.test_processes import Bench
print(asyncio.run(Bench()("environment")).text)
"""
    keys = {
        "ROLLOUT_API_KEY": "secret",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "PYTHON_TOKEN": "secret",
        "SOMETHING": "else",
    }
    keys |= {"LC_ALL": "C.UTF-8", "PYTHONUTF8": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[3],
        env=os.environ | keys,
        capture_output=True,
        text=True,
        check=True,
    )
    names = set(json.loads(done.stdout))
    assert names & keys.keys() == {"SOMETHING", "LC_ALL", "PYTHONUTF8"}
    assert {"PATH", "HOME"} <= names


async def test_a_tool_may_have_another_name_in_its_module_but_needs_one(run: Bench) -> None:
    run.box = run.box.with_tools((offered.renamed, tool(process=True)(offered.nowhere)))
    assert (await run("undecorated", a=3)).content == "3"
    assert "module has no tool nowhere at the top level" in (await run("nowhere", a=3)).text


def test_a_script_that_serves_its_own_tools(tmp_path: Path) -> None:
    script = tmp_path / "agent.py"
    script.write_text(
        """
import asyncio
from rollout_server import tool
from rollout_server.core.message import ToolCall
from rollout_server.edge.tools.pool import ProcessPool
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.runtime.ports import Tool
from rollout_server.runtime.tools.executor import ToolExecutor
from rollout_server.runtime.tools.resources import ToolResources

@tool(process=True)
def double(a: int) -> int:
    return 2 * a

async def main() -> None:
    bench = ToolResources(processes=ProcessPool())
    print((await ToolExecutor((double,), bench).run(ToolCall("c", "double", '{"a": 4}'))).text)
    await bench.close()

if __name__ == "__main__":
    asyncio.run(main())
""",
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("8\n", "")


async def test_a_module_that_cannot_be_imported_is_told_of(tmp_path: Path, run: Bench) -> None:
    module = tmp_path / "broken_tools.py"
    module.write_text(
        "from rollout_server import tool\n\n\n@tool(process=True)\ndef f() -> int:\n    return 1\n", encoding="utf-8"
    )
    sys.path.append(str(tmp_path))
    try:
        import broken_tools  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("broken_tools", None)
    module.write_text("raise LookupError('no such table')", encoding="utf-8")
    run.box = run.box.with_tools((broken_tools.f,))
    with pytest.raises(RolloutFailed) as failed:
        await run("f")
    text = "tool f cannot be run: The tool could not be imported: no such table"
    assert failed.value.failure == Failure(Category.TOOL, text)
