"""Code that blocks the event loop is reported with its stack; an idle loop is not."""

from __future__ import annotations

import asyncio
import re
import time
import traceback
from collections.abc import Callable

import pytest
from rollout_client import AsyncClient
from rollout_server import Agent, Run
from rollout_server.app import Server
from rollout_server.runtime.aio.loop_watchdog import LoopWatch, MostFrequentStack
from rollout_server.testing.trainer import StrictTrainer

from tests.support.start_requests import settings


def hold(seconds: float) -> None:
    """Block the current thread without sleeping."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


class Blocking(Agent):
    """Compute on the event loop, as an agent should not, until it is enough."""

    name = "blocking"

    def __init__(self, is_enough: Callable[[], object]) -> None:
        self._is_enough = is_enough

    async def play(self, run: Run) -> None:
        while not self._is_enough():
            hold(0.3)
            await asyncio.sleep(0.05)
        await run.sample()


async def test_a_server_names_the_agents_line(caplog: pytest.LogCaptureFixture) -> None:
    """On a busy machine the watchdog may not run during 0.3 s, or they may last a second: the agent blocks until it is named."""
    said = r"(was|has been) blocked for \d+ ms at .*test_blocking\.py:\d+ in hold; all rollouts wait"
    async with (
        StrictTrainer() as trainer,
        Server([Blocking(lambda: re.search(said, caplog.text))], settings()) as server,
        AsyncClient(f"127.0.0.1:{server.grpc_port}") as client,
    ):
        run = client.run(messages=[{"role": "user", "content": "Go."}], completions=f"grpc://{trainer.grpc_target}")
        async for _ in run:
            pass
        assert (await client.get(run.uid)).outcome.stop.reason == "stop"
    assert re.search(said, caplog.text)
    assert "in play\n    hold(0.3)" in caplog.text


async def test_a_place_is_told_of_once_and_a_long_one_while_it_lasts(caplog: pytest.LogCaptureFixture) -> None:
    watch = LoopWatch(0.02)
    watch.start()
    try:
        for _ in range(3):
            hold(0.1)
            await asyncio.sleep(0.02)
        assert caplog.text.count("the event loop") == 1
        assert "was blocked for" in caplog.text
        caplog.clear()
        time.sleep(0.5)  # noqa: ASYNC251
        assert "has been blocked for" in caplog.text
    finally:
        watch.stop()


def test_the_function_that_was_found_most_often_is_named() -> None:
    """Code that runs for a moment after the blocking code is often what the watchdog sees last."""
    long, brief = (traceback.StackSummary.from_list([(__file__, 1, name, None)]) for name in ("long", "brief"))
    stacks = MostFrequentStack()
    assert [stacks.add(1.0, each) for each in (brief, long, long, brief)] == [brief, brief, long, long]
    assert stacks.add(2.0, brief) is brief


async def test_code_that_lets_no_thread_run_is_found_too(caplog: pytest.LogCaptureFixture) -> None:
    watch = LoopWatch(0.02)
    watch.start()
    try:
        for _ in range(30):  # on a busy machine the watchdog thread may run too late
            await asyncio.sleep(0.05)
            re.match("(a+)+b", "a" * 22)  # runs in C and holds the GIL all the time
            await asyncio.sleep(0.05)
            if found := re.search(r"the event loop .* at .*test_blocking\.py:\d+ in test_code_that_lets", caplog.text):
                break
    finally:
        watch.stop()
    assert found
    assert "asyncio/" not in caplog.text


async def test_a_loop_that_waits_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    watch = LoopWatch(0.02)
    watch.start()
    await asyncio.gather(asyncio.sleep(0.2), asyncio.to_thread(time.sleep, 0.2))
    watch.stop()
    assert "the event loop" not in caplog.text


async def test_it_can_be_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    async with Server([Blocking(lambda: True)], settings(loop_block_seconds=0)):
        hold(0.3)
        await asyncio.sleep(0.05)
    assert "the event loop" not in caplog.text
