"""Memory of rollouts that wait for a completion of the trainer, measured in a process that has run little before."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any

from bench.judge.loads import Load, Loads
from bench.judge.site import Bench, Running, Site, get, send
from bench.judge.workload import ON_DISK, Api, Floor
from bench.programs.drive import WrongRollout

_WARM_UP = 1
"""It loads the tokenizer. Memory that more rollouts leave behind would be used again."""
_MOST = 128
_TOKENS = 2_000_000
"""Of all prompts together, so that long conversations do not take longer."""
_POLL_SECONDS = 0.05
_SECONDS = 60.0


async def waiting_bytes(bench: Bench, site: Site, loads: Loads, subject: Api | Floor) -> float:
    """Return how much resident memory a rollout adds that waits for its last completion.

    Raises `WrongRollout` if the rollouts do not get that far.
    """
    rollouts = min(_MOST, _TOKENS // loads.workload.context)
    if isinstance(subject, Api):
        async with bench.server(ON_DISK) as server:
            return await _measure(site, server, loads.server(subject, server), rollouts)
    async with bench.floor(site.trainer.url) as floor:
        return await _measure(site, floor, loads.floor(subject, floor), rollouts)


async def _measure(site: Site, running: Running, load: Load, rollouts: int) -> float:
    async with load(_WARM_UP, _WARM_UP) as play:
        await play()
    before = running.child.resident_bytes()
    await send(site.http, f"{site.trainer.url}/hold")
    async with load(rollouts, rollouts) as play:
        playing = asyncio.ensure_future(_awaited(play()))
        try:
            until = time.monotonic() + _SECONDS
            while await get(site.http, f"{site.trainer.url}/waiting", int) < rollouts and not playing.done():
                if time.monotonic() > until:
                    raise WrongRollout(f"after {_SECONDS:g} s, not all of {rollouts} rollouts wait for the trainer")
                await asyncio.sleep(_POLL_SECONDS)
            added = running.child.resident_bytes() - before
        finally:
            await send(site.http, f"{site.trainer.url}/release")
        await playing
    return added / rollouts


async def _awaited(work: Awaitable[Any]) -> None:
    await work
