"""A server shuts down on a signal, whatever its agents are doing."""

from __future__ import annotations

import asyncio
import re
import signal
from pathlib import Path

from rollout_client import AsyncClient
from rollout_server.testing.script import Script, ScriptedReply, tool_call
from rollout_server.testing.trainer import StrictTrainer

from tests.support.processes import ANY_PORTS, Logged, environment, serve, started

STUBBORN = """
import asyncio, contextlib, logging, time
from rollout_server import Agent, tool

log = logging.getLogger("author")

@tool
async def stay():
    '''Swallows its cancellation.'''
    log.warning("began tool")
    while True:
        try:
            await asyncio.sleep(3600)  # tool
        except BaseException:
            pass

class Stubborn(Agent):
    name = "stubborn"
    tools = (stay,)

    async def play(self, run):
        match run.metadata["how"]:
            case "play":
                log.warning("began play")
                while True:
                    with contextlib.suppress(BaseException):
                        await asyncio.sleep(3600)  # play
            case "executor":
                log.warning("began executor")
                await asyncio.to_thread(time.sleep, 3600)
            case "thread":
                await run.run_in_thread("a thread of its own", self.sit)
        await super().play(run)

    def sit(self):
        log.warning("began thread")
        time.sleep(3600)
"""

CLEANING = """
import asyncio, contextlib, logging
from rollout_server import Agent

log = logging.getLogger("author")

class Cleaning(Agent):
    name = "cleaning"
    cleanup_seconds = 3

    def setup(self, run):
        run.state["how"] = run.metadata["how"]

    async def play(self, run):
        log.warning("began %s", run.state["how"])
        await asyncio.sleep(3600)

    async def cleanup(self, run):
        log.warning("cleaned up %s", run.state["how"])
        if run.state["how"] == "hangs":
            await asyncio.sleep(3600)  # hangs
        while run.state["how"] == "swallows":
            with contextlib.suppress(BaseException):
                await asyncio.sleep(3600)  # swallows
        await asyncio.sleep(1)
"""

COUNTED = """
import asyncio, logging
from rollout_server import Agent

log = logging.getLogger("author")

class Counted(Agent):
    name = "counted"

    def setup(self, run):
        run.state["number"] = run.metadata["number"]

    async def play(self, run):
        log.warning("plays %s", run.metadata["how"])
        if run.metadata["how"] != "ends":
            await asyncio.sleep(3600)

    def reward(self, run):
        return float(run.state["number"] == run.metadata["number"])

    def cleanup(self, run):
        log.warning("cleans up %d", run.state["number"])
"""

NEVER_STARTS = """
import asyncio, contextlib, logging
from rollout_server import Agent

class Slow(Agent):
    name = "slow"

    async def start(self):
        logging.getLogger("author").warning("began to start")
        while True:
            with contextlib.suppress(BaseException):
                await asyncio.sleep(3600)
"""


def line_of(text: str, source: str) -> int:
    """The number of the line that contains a text."""
    (found,) = [number for number, line in enumerate(source.splitlines(), start=1) if text in line]
    return found


async def test_nothing_that_goes_on_holds_up_the_end(tmp_path: Path) -> None:
    path = tmp_path / "stubborn.py"
    path.write_text(STUBBORN)
    calls = Script((ScriptedReply(tool_calls=(tool_call("c", "stay", {}),)),))
    async with (
        serve(str(path), cwd=tmp_path, ROLLOUT_DRAIN_SECONDS="0", ROLLOUT_HTTP="false") as server,
        StrictTrainer(script=calls) as trainer,
        AsyncClient(f"127.0.0.1:{server.grpc_port}") as client,
        asyncio.TaskGroup() as group,
    ):

        async def outcome_of(how: str) -> str:
            run = client.run(
                messages=[{"role": "user", "content": "Go."}],
                completions=f"grpc://{trainer.grpc_target}",
                metadata={"how": how},
            )
            async for _ in run:
                pass
            assert run.outcome is not None
            return run.outcome.failure.message

        ways = ("play", "tool", "executor", "thread")
        outcomes = [group.create_task(outcome_of(how)) for how in ways]
        for how in ways:
            await server.logged(f"began {how}")
        server.send(signal.SIGTERM)
        assert {await outcome for outcome in outcomes} == {"the server stopped while the rollout ran; start it again"}
        async with asyncio.timeout(60):
            assert await server.ended() == 0
    for mark in ("# tool", "# play"):
        at = f"{path}:{line_of(mark, STUBBORN)}"
        assert f"ignores its cancellation at {at}; the program exits without it" in server.text
    assert "Traceback" not in server.text


async def test_every_rollout_is_cleaned_up_once_before_the_end(tmp_path: Path) -> None:
    path = tmp_path / "cleaning.py"
    path.write_text(CLEANING)
    ways = ("sleeps", "hangs", "swallows")
    async with (
        serve(str(path), cwd=tmp_path, ROLLOUT_DRAIN_SECONDS="0", ROLLOUT_HTTP="false") as server,
        AsyncClient(f"127.0.0.1:{server.grpc_port}") as client,
        asyncio.TaskGroup() as group,
    ):

        async def warnings_of(how: str) -> list[str]:
            run = client.run(
                messages=[{"role": "user", "content": "Go."}],
                completions="grpc://127.0.0.1:9",  # never called
                metadata={"how": how},
            )
            async for _ in run:
                pass
            assert run.outcome is not None
            assert run.outcome.failure.message == "the server stopped while the rollout ran; start it again"
            return [warning.code for warning in run.outcome.warnings]

        warnings = [group.create_task(warnings_of(how)) for how in ways]
        for how in ways:
            await server.logged(f"began {how}")
        server.send(signal.SIGTERM)
        assert [await warned for warned in warnings] == [[], ["cleanup_failed"], ["cleanup_failed"]]
        async with asyncio.timeout(60):
            assert await server.ended() == 0
    for how in ways:
        assert server.text.count(f"cleaned up {how}") == 1
    for how in ("hangs", "swallows"):
        assert f"did not return within 3 s at {path}:{line_of(f'# {how}', CLEANING)}" in server.text
    assert "Traceback" not in server.text


async def test_two_hundred_rollouts_are_each_cleaned_up_once(tmp_path: Path) -> None:
    """Of those that end by themselves, by a cancel and by SIGTERM, and with plain functions, which run in threads."""
    path = tmp_path / "counted.py"
    path.write_text(COUNTED)
    settings = {"ROLLOUT_DRAIN_SECONDS": "0", "ROLLOUT_HTTP": "false", "ROLLOUT_MAX_RUNNING": "200"}
    ways = ["ends", "cancelled", "cancelled", "drained"] * 50
    async with (
        serve(str(path), cwd=tmp_path, **settings) as server,
        AsyncClient(f"127.0.0.1:{server.grpc_port}") as client,
        asyncio.TaskGroup() as group,
    ):

        async def outcome_of(number: int) -> tuple[str | None, float | None]:
            run = client.run(
                messages=[{"role": "user", "content": "Go."}],
                completions="grpc://127.0.0.1:9",  # never called
                metadata={"how": ways[number], "number": number},
                labels={"how": ways[number]},
            )
            async for _ in run:
                pass
            assert run.outcome is not None
            assert not run.outcome.warnings
            return run.outcome.WhichOneof("end"), run.outcome.reward if run.outcome.HasField("reward") else None

        outcomes = [group.create_task(outcome_of(number)) for number in range(len(ways))]
        while len(re.findall("plays (?:cancelled|drained)", server.text)) < 150:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert len(await client.cancel(labels={"how": "cancelled"})) == 100
        await asyncio.gather(*(each for each, how in zip(outcomes, ways, strict=True) if how != "drained"))
        server.send(signal.SIGTERM)
        ends = {"ends": ("stop", 1.0), "cancelled": ("cancellation", None), "drained": ("failure", None)}
        assert [await outcome for outcome in outcomes] == [ends[how] for how in ways]
        async with asyncio.timeout(60):
            assert await server.ended() == 0
    assert sorted(map(int, re.findall(r"cleans up (\d+)", server.text))) == list(range(len(ways)))
    assert "Traceback" not in server.text


async def test_a_server_that_has_not_started_ends_too(tmp_path: Path) -> None:
    path = tmp_path / "slow.py"
    path.write_text(NEVER_STARTS)
    env = environment(ROLLOUT_TOKENIZERS_OFFLINE="true", ROLLOUT_HTTP="false")
    async with started(Logged, "serve", *ANY_PORTS, str(path), cwd=tmp_path, env=env) as server:
        await server.logged("began to start")
        server.send(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await server.ended() == 0
    assert "stopped by a signal before the server had started" in server.text
    assert "Traceback" not in server.text
