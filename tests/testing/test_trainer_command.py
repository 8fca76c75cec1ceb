"""`rollout trainer` prints one line per received outcome, whatever its contents are."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from .conftest import KeyedCaller

COMMAND = (sys.executable, "-m", "rollout_server.cli", "trainer", "--port", "0", "--tools-from", "")


@asynccontextmanager
async def trainer(
    directory: Path, *options: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, httpx.AsyncClient]]:
    """The command in a separate process, and a client for it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MOCK_")}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *options, cwd=directory, env=environment, stdout=pipe, stderr=pipe
    )
    try:
        assert process.stderr is not None
        line = ""
        while "strict trainer on" not in line:
            line = (await process.stderr.readline()).decode()
            assert line, "the trainer ended before it served"
        async with httpx.AsyncClient(base_url=line.split()[3].rstrip(";"), timeout=60, trust_env=False) as client:
            yield process, client
        process.terminate()
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_each_outcome_is_one_line(tmp_path: Path) -> None:
    async with trainer(tmp_path) as (process, client):
        good, bad = KeyedCaller(client, rollout_id="good"), KeyedCaller(client, rollout_id="b\x1b[2J\nad")
        for asking in (good, bad):
            await asking.play()
        await good.deliver(good.outcome(reward=1.0), key="good")
        await good.deliver(good.outcome(reward=1.0), key="good")
        await bad.deliver(bad.outcome(finish_reason="x\nstrict trainer", final_messages=[]), key="bad")
        again = KeyedCaller(client, rollout_id="good")
        again.take(await again.post(key="again/0/1"))
        await again.deliver(again.failure(), key="again")
        assert process.stdout is not None
        lines = [(await process.stdout.readline()).decode().rstrip("\n") for _ in range(3)]
    generated = sum(len(answer["token_ids"]) for answer in good.answers)
    assert lines[0] == f"good: COMPLETED, stop; 3 turns, {generated} tokens generated, reward 1.0"
    assert lines[1].startswith("b␛[2J⏎ad: COMPLETED, x⏎strict trainer; 3 turns")
    assert "refused: final_messages[0] is missing" in lines[1]
    assert lines[2].startswith("good: ERROR, error; 1 turn, ")


async def test_both_dialects_are_spoken_unless_one_is_asked_for(tmp_path: Path) -> None:
    body = {"rollout_id": "r", "messages": [{"role": "user", "content": "Hi."}]}
    codes = []
    for options in ((), ("--dialect", "masked"), ("--dialect", "plain")):
        async with trainer(tmp_path, *options) as (_, client):
            masked = await client.post("/v1/chat/completions", json=body | {"response_mask": None})
            outcome = await client.post("/v1/rollout/completed", json={})
            codes.append((masked.status_code, outcome.status_code))
    assert codes == [(200, 422), (200, 404), (422, 422)]
