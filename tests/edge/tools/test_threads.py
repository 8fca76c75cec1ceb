"""Synchronous functions: each runs in a thread, which is abandoned if its call is cancelled, and counted while it runs."""

from __future__ import annotations

import asyncio
import contextvars
import json
import subprocess
import sys
import threading
import time

from rollout_server import tool
from rollout_server.core.message import ToolCall
from rollout_server.runtime.tools.executor import ToolExecutor, ToolResult
from rollout_server.runtime.tools.resources import ToolLimits, ToolResources
from rollout_server.runtime.tools.task import ToolTask


async def run(box: ToolExecutor, name: str, **arguments: object) -> ToolResult:
    return await box.run(ToolCall("c", name, json.dumps(arguments)))


async def test_a_thread_that_never_returns_is_left_alone() -> None:
    go, left = threading.Event(), threading.Event()

    @tool(timeout=0.05)
    def hold() -> None:
        go.wait(60)
        left.set()

    box = ToolExecutor((hold,))
    assert (await run(box, "hold")).content == "Error: hold took longer than 0.05 s"
    assert not left.is_set()
    go.set()
    assert await asyncio.to_thread(left.wait, 60)


async def test_threads_are_counted_and_the_next_calls_wait_for_them() -> None:
    go, full = threading.Event(), threading.Barrier(3)
    inside: list[int] = []

    @tool
    def hold(number: int) -> int:
        inside.append(number)
        if not go.is_set():
            full.wait(60)
        go.wait(60)
        return number

    box = ToolExecutor((hold,), ToolResources(ToolLimits(threads=2)))
    running = [asyncio.create_task(run(box, "hold", number=number)) for number in range(4)]
    await asyncio.to_thread(full.wait, 60)
    await asyncio.sleep(0.05)
    assert sorted(inside) == [0, 1]
    go.set()
    assert [result.content for result in await asyncio.gather(*running)] == ["0", "1", "2", "3"]


async def test_a_call_that_was_given_up_holds_its_place_until_its_thread_ends() -> None:
    go, again = threading.Event(), asyncio.Event()

    @tool(timeout=0.05)
    def hold() -> None:
        go.wait(60)

    @tool
    def quick() -> str:
        return "done"

    box = ToolExecutor((hold, quick), ToolResources(ToolLimits(threads=1)))
    await run(box, "hold")
    waiting = asyncio.create_task(run(box, "quick"))
    waiting.add_done_callback(lambda _: again.set())
    await asyncio.sleep(0.05)
    assert not again.is_set()
    go.set()
    assert (await waiting).content == "done"


async def test_whatever_a_thread_raises_arrives() -> None:
    @tool
    def raise_it(kind: str) -> None:
        raise {"exit": SystemExit(3), "key": KeyboardInterrupt(), "stop": StopIteration(), "gone": GeneratorExit()}[
            kind
        ]

    box = ToolExecutor((raise_it,))
    said = [(await run(box, "raise_it", kind=kind)).content for kind in ("exit", "key", "stop", "gone")]
    assert said == [
        "Error: SystemExit: 3",
        "Error: KeyboardInterrupt",
        "Error: StopIteration",
        "Error: GeneratorExit",
    ]


async def test_a_thread_sees_the_context_of_its_call() -> None:
    variable = contextvars.ContextVar("variable", default="unset")

    @tool
    def look() -> str:
        return variable.get()

    variable.set("set")
    assert (await run(ToolExecutor((look,)), "look")).content == "set"


async def test_a_result_is_written_in_the_thread() -> None:
    where: list[int] = []

    class Late:
        pass

    @tool
    def give() -> object:
        where.append(threading.get_ident())
        return Late()

    assert (await run(ToolExecutor((give,)), "give")).failed
    assert where != [threading.get_ident()]


def test_a_program_does_not_wait_for_threads_that_were_left_alone() -> None:
    program = """
import asyncio, threading
from rollout_server import tool
from rollout_server.core.message import ToolCall
from rollout_server.runtime.tools.executor import ToolExecutor

@tool(timeout=0.05)
def hold() -> None:
    threading.Event().wait()

print(asyncio.run(ToolExecutor((hold,)).run(ToolCall("c", "hold", "{}"))).text)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "Error: hold took longer than 0.05 s\n"
    assert done.stderr == "tool hold (<string>:7) took longer than 0.05 s\n"


async def test_work_outside_a_toolbox_waits_for_its_thread() -> None:
    assert await ToolTask("alone").in_thread(lambda: time.sleep(0) or "done") == "done"
