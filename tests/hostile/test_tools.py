"""Tools in processes that try to outlive their calls, to read the server's data, or to exhaust the machine."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rollout_server import tool
from rollout_server.edge.tools import process as tool_process
from rollout_server.runtime.tools.policy import CPU_SECONDS, MEMORY_BYTES, ToolPolicy

from tests.edge.tools import test_processes
from tests.edge.tools.test_processes import gone, numbers_in, parent_of, state_of, wait_until_gone

linux = pytest.mark.skipif(sys.platform != "linux", reason="subreapers and prctl exist only on Linux")
ROOT = Path(__file__).parents[2]
STRAY = """
import os, pathlib, signal, sys, time
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
if sys.argv[2] == "daemon" and os.fork():
    os._exit(0)
os.setsid()
if sys.argv[2] == "daemon" and os.fork():
    os._exit(0)
path = pathlib.Path(sys.argv[1])
path.with_suffix(".new").write_text(str(os.getpid()))
path.with_suffix(".new").rename(path)
time.sleep(1000)
"""


@tool(process=True)
def leave(how: str, then: str, marks: str) -> int:
    """Starts a program in a session of its own, or a daemon, and ends, crashes, waits or lets its supervisor stand still."""
    subprocess.Popen([sys.executable, "-c", STRAY, marks, how], env={})
    path = Path(marks)
    while not path.exists():
        time.sleep(0.01)
    match then:
        case "crash":
            os._exit(3)
        case "wait" | "stop":
            if then == "stop":
                os.kill(os.getppid(), signal.SIGSTOP)
            time.sleep(1000)
    return os.getpid()


@tool(process="fresh")
def leave_fresh(marks: str) -> int:
    """The same in a process for this call."""
    return leave.run_here({"how": "session", "then": "return", "marks": marks}) and 0  # type: ignore[return-value]


@tool(process=True)
def spy(number: int) -> list[str]:
    """What it can read of the server."""
    found = []
    for name in ("environ", "mem", "maps"):
        try:
            with open(f"/proc/{number}/{name}", "rb") as file:
                found.append(f"{name}: {file.read(1)!r}")
        except OSError as error:
            found.append(f"{name}: {type(error).__name__}")
    return [*found, *(f"{name}={value}" for name, value in os.environ.items() if "hush" in value)]


@tool(process=True)
def limits() -> list[int]:
    """Its own."""
    statm = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    return [resource.getrlimit(resource.RLIMIT_AS)[0] - statm, resource.getrlimit(resource.RLIMIT_CPU)[0]]


@tool(process=True)
def eat(size: int) -> int:
    """Takes memory."""
    return len(bytes(size))


class Bench(test_processes.Bench):
    """The bench of `test_processes`, with these tools."""

    def __init__(self) -> None:
        super().__init__(tools=(leave, leave_fresh, spy, limits, eat))


@pytest.fixture
async def run() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    await bench.bench.close()
    assert bench.pool.alive == 0


ways = pytest.mark.parametrize("how", ["session", "daemon"])


@linux
@ways
async def test_what_left_the_session_dies_with_a_cancelled_call(run: Bench, tmp_path: Path, how: str) -> None:
    marks = tmp_path / "marks"
    running = asyncio.create_task(run("leave", how=how, then="wait", marks=str(marks)))
    (stray,) = await asyncio.to_thread(numbers_in, marks)
    running.cancel()
    await gone(stray)


@linux
@ways
async def test_it_dies_with_a_process_that_crashes(run: Bench, tmp_path: Path, how: str) -> None:
    marks = tmp_path / "marks"
    told = await run("leave", how=how, then="crash", marks=str(marks))
    assert told.text == "Error: The tool's process exited with status 3"
    await gone(*numbers_in(marks))


@linux
@ways
async def test_it_dies_when_the_pool_lets_the_process_go(run: Bench, tmp_path: Path, how: str) -> None:
    marks = tmp_path / "marks"
    worker = int((await run("leave", how=how, then="return", marks=str(marks))).text)
    (stray,) = numbers_in(marks)
    os.kill(stray, 0)  # it exists, until
    await run.bench.close()
    await gone(stray, worker)


@linux
async def test_nothing_of_a_fresh_process_is_left_after_its_call(run: Bench, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    assert (await run("leave_fresh", marks=str(marks))).text == "0"
    await gone(*numbers_in(marks))


@linux
async def test_it_dies_with_a_worker_that_is_killed(run: Bench, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    worker = int((await run("leave", how="daemon", then="return", marks=str(marks))).text)
    supervisor = parent_of(worker)
    os.kill(worker, signal.SIGKILL)
    await gone(*numbers_in(marks), worker, supervisor)


@linux
async def test_a_worker_dies_with_its_supervisor(run: Bench, tmp_path: Path) -> None:
    worker = int((await run("leave", how="session", then="return", marks=str(tmp_path / "marks"))).text)
    os.kill(parent_of(worker), signal.SIGKILL)
    await gone(worker)
    for stray in numbers_in(tmp_path / "marks"):  # no process remains that could end it (docs/agents.md)
        os.kill(stray, signal.SIGKILL)


@linux
async def test_a_supervisor_that_its_tool_has_stopped_is_killed(
    run: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_process, "_GRACE_SECONDS", 0.1)
    marks = tmp_path / "marks"
    running = asyncio.create_task(run("leave", how="session", then="stop", marks=str(marks)))
    (stray,) = await asyncio.to_thread(numbers_in, marks)
    supervisor = parent_of(parent_of(stray))
    while state_of(supervisor) != "T":  # noqa: ASYNC110 - no event reports it
        await asyncio.sleep(0.01)
    running.cancel()
    await run.bench.close()
    assert run.pool.alive == 0
    os.kill(stray, signal.SIGKILL)  # no process remained that could end it


@linux
@ways
def test_it_dies_with_a_server_that_is_killed(tmp_path: Path, how: str) -> None:
    marks = tmp_path / "marks"
    arguments = f"how={how!r}, then='wait', marks={str(marks)!r}"
    program = (
        f"import asyncio\nfrom tests.hostile.test_tools import Bench\nasyncio.run(Bench()('leave', {arguments}))\n"
    )
    server = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    (stray,) = numbers_in(marks)
    server.kill()
    server.wait()
    wait_until_gone(stray)


SPIED = """
import asyncio, ctypes, os, sys
from tests.hostile.test_tools import Bench
if sys.argv[1:] != ["again"]:  # only a program that is started anew has fewer capabilities
    PR_CAPBSET_DROP = 24
    for capability in (19, 21, 38):  # SYS_PTRACE, SYS_ADMIN, PERFMON: in a container root has none of them, unless they are given
        ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    os.execv(sys.executable, [*sys.orig_argv, "again"])
async def main():
    bench = Bench()
    print((await bench("spy", number=os.getpid())).text)
    await bench.bench.close()
asyncio.run(main())
"""


@linux
def test_a_tool_reads_nothing_of_its_server() -> None:
    secrets = {"ROLLOUT_API_KEY": "hush-1", "AWS_SECRET_ACCESS_KEY": "hush-2", "HTTPS_PROXY": "http://u:hush-3@proxy"}
    done = subprocess.run(
        [sys.executable, "-c", SPIED], cwd=ROOT, env=os.environ | secrets, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [f"{name}: PermissionError" for name in ("environ", "mem", "maps")]


@linux
async def test_memory_and_processor_are_limited_without_a_word_of_the_author(run: Bench) -> None:
    memory, processor = json.loads((await run("limits")).text)
    assert MEMORY_BYTES - 64 * 2**20 < memory <= MEMORY_BYTES
    assert CPU_SECONDS <= processor < CPU_SECONDS + 60
    assert (await run("eat", size=MEMORY_BYTES + MEMORY_BYTES // 4)).content == "Error: MemoryError"


@pytest.mark.parametrize("names", ["PATH", ["PATH"], (1,), None])
def test_names_of_variables_are_a_tuple(names: object) -> None:
    with pytest.raises(TypeError, match="environment must be a tuple of names"):
        ToolPolicy(process=True, environment=names)  # type: ignore[arg-type]


def test_only_a_process_has_variables() -> None:
    with pytest.raises(ValueError, match="set process=True"):
        ToolPolicy(environment=("PATH",))
