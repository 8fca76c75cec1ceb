"""Waiting for the first of several futures."""

from __future__ import annotations

import asyncio

import pytest
from rollout_server.runtime.aio.event_loop import first_done


async def test_it_returns_with_the_first_future_and_leaves_the_others_alone() -> None:
    loop = asyncio.get_running_loop()
    first, second, cancelled = loop.create_future(), loop.create_future(), loop.create_future()
    waiting = asyncio.create_task(first_done(first, second, cancelled))
    await asyncio.sleep(0)
    second.set_result(None)
    cancelled.cancel()
    await waiting
    assert not first.done()
    await first_done(first, second)  # one that is done already


async def test_it_waits_at_most_as_long_as_it_may() -> None:
    never = asyncio.get_running_loop().create_future()
    await first_done(never, within=0.01)
    assert not never.done()


async def test_a_cancellation_reaches_the_caller_and_none_of_the_futures() -> None:
    never = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(first_done(never, within=60.0))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not never.done()
