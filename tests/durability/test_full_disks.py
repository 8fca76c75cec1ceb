"""A disk that is full or cannot be written, and a journal that is deleted while the server runs."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import pytest

from tests.durability.stage import Stage
from tests.durability.trials import Trial, Unavailable, trial
from tests.support.processes import ANY_PORTS, command, environment

UNLIMITED = resource.RLIM_INFINITY
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="prlimit is a system call of Linux")


@contextmanager
def no_room(process: int) -> Iterator[None]:
    """The process can write to no file until the block ends; then there is room again."""
    resource.prlimit(process, resource.RLIMIT_FSIZE, (0, UNLIMITED))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # the test has killed it
            resource.prlimit(process, resource.RLIMIT_FSIZE, (UNLIMITED, UNLIMITED))


async def accepted_again(here: Stage, refused: Sequence[Trial]) -> None:
    """Send starts as a client does that was told to try later, until they are accepted; they end as any other rollout."""

    async def send(each: Trial) -> None:
        while True:
            try:
                return await here.clients.start(each)
            except (Unavailable, grpc.aio.AioRpcError):
                await asyncio.sleep(0.05)

    await asyncio.gather(*map(send, refused))
    await here.recover_and_check(refused)


def starts(run: str) -> list[Trial]:
    """A rollout for each way to start one."""
    return [trial("grpc", 1, run), trial("plain", 2, run), trial("masked", 3, run)]


async def check_refused(here: Stage, refused: Sequence[Trial]) -> None:
    """These starts are refused, and the errors name the journal."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await here.clients.start(refused[0])
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert str(here.server.journal) in (caught.value.details() or "")
    for path, body in (
        ("/v1/rollout/init", here.clients.plain_body(refused[1])),
        ("/rollout", here.clients.masked_body(refused[2])),
    ):
        async with here.clients.http.post(here.server.url + path, json=body) as response:
            assert response.status == 503
            assert int(response.headers["retry-after"]) >= 1
            assert str(here.server.journal) in (await response.json())["detail"]


async def metrics(here: Stage) -> str:
    """The server's metrics, as text."""
    async with here.clients.http.get(here.server.url + "/metrics") as response:
        return await response.text()


@on_linux
async def test_a_full_disk_refuses_new_rollouts_until_there_is_room(here: Stage) -> None:
    refused = starts("full")
    await here.prepare(refused)
    here.trainers.generations.counts.clear()
    with no_room(here.server.process):
        await check_refused(here, refused)
        assert "rollout_journal_failing 1.0" in await metrics(here)
        assert here.trainers.keys_by_rollout().keys().isdisjoint(each.rollout_id for each in refused)
    await accepted_again(here, refused)
    assert "rollout_journal_failing 0.0" in await metrics(here)
    assert "Traceback" not in here.server.log
    here.server.kill()
    await here.server.restart()
    await here.recover_and_check(refused)


@on_linux
async def test_running_rollouts_wait_for_room(here: Stage) -> None:
    """The disk is full in the middle of rollouts. They go on when there is room again."""
    trials = [each for each in here.trials(each=8) if each.kind != "masked"]
    await here.prepare(trials)
    here.trainers.generations.counts.clear()
    await asyncio.gather(*(here.clients.start(each) for each in trials))
    with no_room(here.server.process):
        await check_refused(here, starts("meanwhile"))
    await accepted_again(here, trials)


@on_linux
async def test_a_crash_with_a_full_disk_loses_nothing(here: Stage) -> None:
    trials = [each for each in here.trials(each=8) if each.kind != "masked"]
    await here.prepare(trials)
    here.trainers.generations.counts.clear()
    await asyncio.gather(*(here.clients.start(each) for each in trials))
    with no_room(here.server.process):
        await check_refused(here, starts("before the crash"))
        here.server.kill()
        await here.server.ended()
    await here.server.start()
    await here.recover_and_check(trials)


async def test_a_journal_that_was_deleted_refuses_new_rollouts(here: Stage) -> None:
    await here.prepare(here.trials())
    for file in here.server.journal.iterdir():
        file.unlink()
    await check_refused(here, starts("deleted"))
    here.server.kill()
    await here.server.restart()
    again = starts("after the restart")
    await here.prepare(again)
    here.trainers.generations.counts.clear()
    await here.recover_and_check(again)


def unwritable(tmp_path: Path) -> list[Path]:
    """Directories that cannot be created or written. Root may write to a directory without write permission."""
    file, closed = tmp_path / "file", tmp_path / "closed"
    file.write_text("")
    closed.mkdir(mode=0o500)
    return [file / "journal", *([] if os.geteuid() == 0 else [closed])]


async def test_a_directory_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    for directory in unwritable(tmp_path):
        tried = await command("serve", *ANY_PORTS, cwd=tmp_path, env=environment(ROLLOUT_JOURNAL=str(directory)))
        assert tried.code == 1, directory
        assert "Traceback" not in tried.err
        assert "ROLLOUT_JOURNAL" in tried.err
        assert str(directory) in tried.err
