"""Readers of the log start at any number, miss and repeat nothing, and end with the last record."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_server.core.error import Gone
from rollout_server.core.outcome import Stop
from rollout_server.core.record import Ended, Note, Record
from rollout_server.runtime.log import Entry, Log

from tests.support.jumping_loop import JumpingLoop

END = Ended(Stop("stop"))


def note(number: int) -> Note:
    return Note(0, "n", str(number))


def publish(log: Log, records: Iterable[Record], time: float = 0.0) -> None:
    log.append(records, time)
    log.publish(len(log.entries))


async def read(log: Log, after: int, most: int | None = None, pause: float = 0) -> list[Entry]:
    """The entries for a reader that leaves after `most` of them, with a pause after each."""
    entries: list[Entry] = []
    follow = log.follow(after)
    async for entry in follow:
        entries.append(entry)
        if len(entries) == most:
            break
        await asyncio.sleep(pause)
    await follow.aclose()  # type: ignore[attr-defined]
    return entries


def written(count: int) -> Log:
    log = Log()
    publish(log, [note(number) for number in range(1, count)], time=1.0)
    publish(log, [END], time=2.0)
    return log


@pytest.mark.parametrize("after", range(6))
async def test_a_finished_log_is_read_from_any_number_on(after: int) -> None:
    entries = await read(written(5), after)
    assert [entry.sequence for entry in entries] == list(range(after + 1, 6))
    assert [entry.record for entry in entries] == [*map(note, range(after + 1, 5)), *([END] if after < 5 else [])]
    assert [entry.time for entry in entries] == [1.0] * max(4 - after, 0) + [2.0] * (after < 5)


@pytest.mark.parametrize("after", [6, 7, 2**64 - 1])
async def test_beyond_the_end_there_is_nothing(after: int) -> None:
    with pytest.raises(Gone) as gone:
        await read(written(5), after)
    assert (gone.value.oldest, gone.value.newest, gone.value.reason) == (1, 5, "EVENTS_GONE")


async def test_a_reader_at_the_newest_entry_waits_for_the_next() -> None:
    log = Log()
    publish(log, [note(1)])
    reader = asyncio.create_task(read(log, 1, most=1))
    await asyncio.sleep(1)
    assert not reader.done()
    publish(log, [note(2), note(3)])
    assert [entry.sequence for entry in await reader] == [2]


async def test_nothing_is_an_entry_yet_and_readers_wait() -> None:
    log = Log()
    assert (log.last_sequence, [*log.entries]) == (0, [])
    reader = asyncio.create_task(read(log, 0))
    await asyncio.sleep(1)
    publish(log, [])
    await asyncio.sleep(1)
    publish(log, [END])
    assert [entry.record for entry in await reader] == [END]


async def test_whoever_wants_the_end_only_gets_it_once_it_is_there() -> None:
    log = Log()
    waiting = [asyncio.create_task(log.final_entry()) for _ in range(3)]
    waiting[0].cancel()
    for number in range(1, 4):
        await asyncio.sleep(1)
        publish(log, [note(number)])
    await asyncio.sleep(1)
    assert [task.done() for task in waiting] == [True, False, False]
    publish(log, [END])
    assert [(await task).sequence for task in waiting[1:]] == [4, 4]
    assert (await log.final_entry()).record == END


async def test_a_reader_that_leaves_while_it_waits_disturbs_nobody() -> None:
    log = Log()
    leaving, staying = asyncio.create_task(read(log, 0)), asyncio.create_task(read(log, 0))
    await asyncio.sleep(1)
    leaving.cancel()
    publish(log, [note(1), END])
    assert [entry.sequence for entry in await staying] == [1, 2]


chunks = st.lists(st.tuples(st.floats(0, 3), st.integers(0, 4)), max_size=12)
visits = st.lists(st.tuples(st.floats(0, 3), st.integers(1, 5), st.floats(0, 1)), max_size=8)


@settings(deadline=None)
@given(chunks, st.lists(visits, min_size=1, max_size=4))
def test_readers_that_come_and_go_miss_nothing_and_repeat_nothing(
    written: list[tuple[float, int]], readers: list[list[tuple[float, int, float]]]
) -> None:
    """Each reader visits a growing log repeatedly, resumes after the last number it has seen, and finally stays."""

    async def write(log: Log) -> None:
        for pause, count in written:
            await asyncio.sleep(pause)
            publish(log, [note(log.last_sequence + 1 + offset) for offset in range(count)])
        publish(log, [END])

    async def visit(log: Log, times: list[tuple[float, int, float]]) -> list[Entry]:
        seen: list[Entry] = []
        for away, most, pause in times:
            await asyncio.sleep(away)
            seen += await read(log, len(seen), most, pause)
        return seen + await read(log, len(seen))

    async def play() -> None:
        log = Log()
        writer = asyncio.create_task(write(log))
        everything = await asyncio.gather(*(visit(log, times) for times in readers))
        await writer
        for seen in everything:
            assert seen == [*log.entries]
            assert [entry.sequence for entry in seen] == list(range(1, len(seen) + 1))
            assert seen[-1].record == END

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(play())


async def test_readers_see_only_published_entries() -> None:
    log = Log()
    log.append([note(1), note(2), END], 0)
    reader = asyncio.create_task(read(log, 0))
    final = asyncio.create_task(log.final_entry())
    for published in (0, 1, 2):
        log.publish(published)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert log.last_sequence == published
        assert [reader.done(), final.done(), log.is_over] == [False, False, False]
        with pytest.raises(Gone):
            log.check(published + 1)
    log.publish(3)
    assert [entry.sequence for entry in await reader] == [1, 2, 3]
    assert (await final).record == END
    assert log.is_over
