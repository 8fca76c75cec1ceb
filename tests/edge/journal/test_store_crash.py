"""A process that is killed in the middle of its commits: what it reported as committed is there, and logs have no gaps."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tests.edge.journal.store import accepted, appended, query, stored

ROOT = Path(__file__).resolve().parents[3]

PROGRAM = """
import asyncio, sys
from pathlib import Path
from rollout_server.edge.journal import SqliteJournal
from tests.edge.journal.store import accepted, appended

async def rollout(journal, uid, flushes):
    journal.write(accepted(uid))
    n = 0
    while True:
        n += 1
        journal.write(appended(uid, n, n, text="x" * 1000), lambda n=n: print(uid, n, flush=True))
        await (journal.flush() if flushes else asyncio.sleep(0.001))

async def main():
    async with SqliteJournal(Path(sys.argv[1])) as journal:
        await journal.load()
        await asyncio.gather(*(rollout(journal, f"r{n}", n % 2) for n in range(8)))

asyncio.run(main())
"""


@pytest.mark.parametrize("lines", [1, 100, 2000])
async def test_a_killed_process_loses_nothing_that_was_committed(directory: Path, lines: int) -> None:
    """It is killed after it has reported some commits, and so in the middle of others."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-c", PROGRAM, str(directory)]
    process = await asyncio.create_subprocess_exec(*program, stdout=asyncio.subprocess.PIPE, cwd=ROOT, env=environment)
    assert process.stdout is not None
    reported = [await process.stdout.readline() for _ in range(lines)]
    process.kill()
    reported += (await process.stdout.read()).splitlines(keepends=True)
    await process.wait()
    last: dict[str, int] = {}
    for line in reported:
        if line.endswith(b"\n"):
            uid, n = line.decode().split()
            assert int(n) == last.get(uid, 0) + 1
            last[uid] = int(n)
    loaded = await stored(directory)
    assert [rollout.start for rollout in loaded] == [accepted(f"r{n}").start for n in range(8)]
    for rollout in loaded:
        count = len(rollout.entries)
        assert count >= last.get(rollout.start.uid, 0)
        assert list(rollout.entries) == appended(rollout.start.uid, 1, count, text="x" * 1000).entries
    assert query(directory, "PRAGMA integrity_check") == [("ok",)]
