"""The lag of the event loop, on a loop with manual time."""

from __future__ import annotations

import asyncio

from rollout_server.edge.metrics.observer import MetricsObserver
from rollout_server.runtime.aio.loop_watchdog import LoopLag

from tests.edge.metrics.counted import read
from tests.support.jumping_loop import JumpingLoop


async def test_a_loop_that_is_on_time_has_no_lag() -> None:
    lags: list[float] = []
    lag = LoopLag(lags.append, 0.1)
    lag.start()
    await asyncio.sleep(1.05)
    await lag.stop()
    assert len(lags) == 10
    assert max(lags) < 1e-9


async def test_what_holds_the_loop_shows_as_lag() -> None:
    lags: list[float] = []
    lag = LoopLag(lags.append, 0.1)
    lag.start()
    await asyncio.sleep(0.05)
    loop = asyncio.get_running_loop()
    assert isinstance(loop, JumpingLoop)
    loop._jumping.now += 3.0  # as if a callback had taken that long
    await asyncio.sleep(0.01)
    await lag.stop()
    assert [round(each, 6) for each in lags] == [2.95]


async def test_lag_is_measured_between_start_and_stop_and_once() -> None:
    lags: list[float] = []
    lag = LoopLag(lags.append, 0.1)
    await lag.stop()
    await asyncio.sleep(0.5)
    assert lags == []
    for _ in range(2):
        lag.start()
        lag.start()
        await asyncio.sleep(0.15)
        await lag.stop()
        await asyncio.sleep(1)
    assert len(lags) == 2


async def test_lag_is_shown() -> None:
    metrics = MetricsObserver()
    lag = LoopLag(metrics.families.loop_lag.observe)
    lag.start()
    await asyncio.sleep(1.05)
    await lag.stop()
    assert read(metrics).value("rollout_loop_lag_seconds_count") == 10
