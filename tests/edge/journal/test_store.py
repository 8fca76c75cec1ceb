"""What is written to the journal is what the next process loads; changes share commits and keep their order."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from rollout_server.edge.journal import SqliteJournal
from rollout_server.runtime.journal import (
    CredentialsChanged,
    DeliveryChanged,
    EntriesAppended,
    OutcomeReceived,
    RolloutDropped,
    StoredDelivery,
)
from rollout_server.runtime.log import Entry
from rollout_server.runtime.outcome_delivery import Delivery, DeliveryState
from rollout_server.runtime.ports import Credentials

from tests.edge.journal.store import accepted, appended, files, permissions, query, stored

SECRETS = Credentials("sk-completions", "sk-outcome", "sk-tools", {"judge": "sk-judge"})


def rows(directory: Path) -> list[tuple[int, int, int]]:
    return query(directory, "SELECT rollout, first_sequence, last_sequence FROM entries ORDER BY 1, 2")


async def test_a_new_journal_is_empty_private_and_keeps_its_id(directory: Path) -> None:
    async with SqliteJournal(directory) as journal:
        assert journal.is_durable
        assert await journal.load() == []
        first = journal.server_id
        modes = permissions(directory)
    assert modes.pop(directory.name) == 0o700
    assert modes == dict.fromkeys(
        ["journal.sqlite3", "journal.sqlite3-wal", "journal.sqlite3-shm", "lock", "key"], 0o600
    )
    async with SqliteJournal(directory) as journal:
        assert journal.server_id == first
        assert len(first) == 10


async def test_rollouts_are_loaded_in_the_order_of_acceptance(journal: SqliteJournal, directory: Path) -> None:
    uids = ["z", "a", "m", "b"]
    for uid in uids:
        journal.write(accepted(uid, SECRETS))
        journal.write(appended(uid, 1, 2))
    await journal.flush()
    for uid in reversed(uids):
        journal.write(appended(uid, 3, 3))
    await journal.close()
    loaded = await stored(directory)
    assert [rollout.start for rollout in loaded] == [accepted(uid, SECRETS).start for uid in uids]
    assert [list(rollout.entries) for rollout in loaded] == [appended(uid, 1, 3).entries for uid in uids]
    assert not any(rollout.received or rollout.stored_delivery for rollout in loaded)


async def test_records_of_one_commit_share_a_row(journal: SqliteJournal, directory: Path) -> None:
    for uid in "ab":
        journal.write(accepted(uid))
        for n in range(1, 6):
            journal.write(appended(uid, n, n))
    await journal.flush()
    journal.write(appended("a", 6, 7))
    await journal.flush()
    assert rows(directory) == [(1, 1, 5), (1, 6, 7), (2, 1, 5)]


async def test_the_acceptance_of_a_rollout_and_its_first_turn_share_a_commit(
    journal: SqliteJournal, directory: Path
) -> None:
    async def first_turn() -> None:
        journal.write(appended("a", 2, 2))
        await journal.flush()

    async def drive() -> None:
        await asyncio.create_task(first_turn())

    journal.write(accepted("a"))
    journal.write(appended("a", 1, 1))
    driver = asyncio.create_task(drive())
    await journal.flush()
    await driver
    assert rows(directory) == [(1, 1, 2)]


async def test_changes_are_committed_although_nobody_waits(journal: SqliteJournal, directory: Path) -> None:
    committed = asyncio.Event()
    journal.write(accepted("a"))
    journal.write(appended("a", 1, 1))
    journal.write(appended("a", 2, 2), committed.set)
    await committed.wait()
    assert rows(directory) == [(1, 1, 2)]


async def test_callbacks_run_in_order_before_flush_returns(journal: SqliteJournal) -> None:
    heard: list[int] = []
    journal.write(accepted("a"), lambda: heard.append(0))
    for n in range(1, 100):
        journal.write(appended("a", n, n), lambda n=n: heard.append(n))
        if n % 7 == 0:
            await asyncio.sleep(0)
    assert len(heard) < 100
    await journal.flush()
    assert heard == [*range(100)]


async def test_a_callback_may_write_and_may_fail(
    journal: SqliteJournal, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[str] = []

    def fail() -> None:
        raise RuntimeError("a bug")

    journal.write(accepted("a"), lambda: journal.write(appended("a", 1, 1), lambda: heard.append("again")))
    journal.write(accepted("b"), fail)
    journal.write(accepted("c"), lambda: heard.append("c"))
    await journal.flush()
    assert heard[0] == "c"
    await journal.flush()
    assert heard == ["c", "again"]
    assert "a bug" in caplog.text


async def test_each_of_many_rollouts_that_write_at_once_waits_for_its_own_changes(
    journal: SqliteJournal, directory: Path
) -> None:
    async def rollout(uid: str) -> None:
        journal.write(accepted(uid))
        for n in range(1, 21):
            committed = asyncio.Event()
            journal.write(appended(uid, n, n), committed.set)
            await journal.flush()
            assert committed.is_set()

    await asyncio.gather(*(rollout(f"r{n}") for n in range(20)))
    await journal.close()
    assert [len(each.entries) for each in await stored(directory)] == [20] * 20


async def test_a_cancelled_flush_disturbs_nobody(journal: SqliteJournal) -> None:
    journal.write(accepted("a"))
    first, second = asyncio.create_task(journal.flush()), asyncio.create_task(journal.flush())
    await asyncio.sleep(0)
    first.cancel()
    await second
    assert first.cancelled()


async def test_credentials_are_encrypted_changed_and_deleted(journal: SqliteJournal, directory: Path) -> None:
    for uid in "abc":
        journal.write(accepted(uid, SECRETS))
    await journal.flush()
    journal.write(CredentialsChanged("b", replace(SECRETS, completions="sk-other")))
    journal.write(CredentialsChanged("c", Credentials()))
    await journal.close()
    everything = b"".join(files(directory).values())
    assert b"sk-" not in everything
    assert b"team-a" in everything
    loaded = [rollout.start.request.credentials for rollout in await stored(directory)]
    assert loaded == [SECRETS, replace(SECRETS, completions="sk-other"), Credentials()]
    assert query(directory, "SELECT uid FROM rollouts WHERE credentials IS NULL") == [("c",)]


async def test_a_delivery_keeps_its_body_and_its_newest_state(journal: SqliteJournal, directory: Path) -> None:
    body, key = bytes(range(256)) * 1000, "key of a"
    began = StoredDelivery(Delivery(), key, 1700003600.5, body)
    attempted = replace(began, delivery=Delivery(attempts=3, error="503 \ud800", next_attempt=1700000100.25))
    over = replace(began, delivery=Delivery(DeliveryState.EXPIRED, 9, "no route", ended=1700003600.75))
    for uid in "abc":
        journal.write(accepted(uid))
    journal.write(DeliveryChanged("a", began))
    journal.write(DeliveryChanged("b", began))
    await journal.flush()
    journal.write(DeliveryChanged("a", attempted))
    await journal.flush()
    journal.write(DeliveryChanged("b", attempted))
    journal.write(DeliveryChanged("b", over))
    journal.write(OutcomeReceived("c"))
    await journal.close()
    a, b, c = await stored(directory)
    assert a.stored_delivery == replace(attempted, delivery=replace(attempted.delivery, error="503 \\ud800"))
    assert b.stored_delivery == over
    assert c.stored_delivery is None
    assert [each.received for each in (a, b, c)] == [False, False, True]


async def test_a_dropped_rollout_leaves_nothing(journal: SqliteJournal, directory: Path) -> None:
    delivery = StoredDelivery(Delivery(), "key", 1.0, b"body")
    for uid in "abc":
        journal.write(accepted(uid, SECRETS))
        journal.write(appended(uid, 1, 3))
        journal.write(DeliveryChanged(uid, delivery))
        if uid == "a":
            await journal.flush()
    journal.write(RolloutDropped("a"))
    journal.write(RolloutDropped("b"))  # in the commit that accepts it
    heard: list[str] = []
    for change in (
        OutcomeReceived("a"),
        CredentialsChanged("a", SECRETS),
        DeliveryChanged("b", delivery),
        RolloutDropped("a"),
    ):
        journal.write(change, lambda change=change: heard.append(type(change).__name__))
    await journal.flush()
    assert heard == ["OutcomeReceived", "CredentialsChanged", "DeliveryChanged", "RolloutDropped"]
    for table in ("rollouts", "entries", "deliveries", "outcomes"):
        assert query(directory, f"SELECT count(*) FROM {table}") == [(1,)], table
    await journal.close()
    assert [rollout.start.uid for rollout in await stored(directory)] == ["c"]


async def test_the_space_of_dropped_rollouts_is_used_again(journal: SqliteJournal, directory: Path) -> None:
    async def rollouts(name: str) -> int:
        uids = [f"{name}{n}" for n in range(50)]
        for uid in uids:
            journal.write(accepted(uid))
            journal.write(appended(uid, 1, 20, text="x" * 500))
        await journal.flush()
        for uid in uids:
            journal.write(RolloutDropped(uid))
        await journal.flush()
        return int(query(directory, "PRAGMA page_count")[0][0])

    first = await rollouts("a")
    assert await rollouts("b") <= first * 1.2


async def test_the_next_process_continues(directory: Path) -> None:
    async with SqliteJournal(directory) as journal:
        await journal.load()
        journal.write(accepted("a"))
        journal.write(appended("a", 1, 2))
        journal.write(accepted("b"))
    async with SqliteJournal(directory) as journal:
        await journal.load()
        journal.write(appended("a", 3, 4))
        journal.write(RolloutDropped("b"))
        journal.write(accepted("c"))
    a, c = await stored(directory)
    assert list(a.entries) == appended("a", 1, 4).entries
    assert (c.start.uid, list(c.entries)) == ("c", [])


@pytest.mark.parametrize(("first", "last"), [(2, 2), (4, 5), (1, 3)])
async def test_entries_that_leave_a_gap_are_refused(journal: SqliteJournal, first: int, last: int) -> None:
    journal.write(accepted("a"))
    journal.write(appended("a", 1, 2))
    with pytest.raises(ValueError, match=r"rollout a has records up to 2 in the journal; these are \["):
        journal.write(appended("a", first, last))
    journal.write(appended("a", 3, 3))
    await journal.flush()


async def test_wrong_orders_of_calls_are_refused(directory: Path) -> None:
    journal = SqliteJournal(directory)
    async with journal:
        with pytest.raises(RuntimeError, match="was not loaded"):
            journal.write(accepted("a"))
        await journal.load()
        with pytest.raises(ValueError, match="rollout a is not in the journal"):
            journal.write(appended("a", 1, 1))
        journal.write(accepted("a"))
        with pytest.raises(ValueError, match="rollout a is in the journal already"):
            journal.write(accepted("a"))
    with pytest.raises(RuntimeError, match="is not open"):
        journal.write(accepted("b"))
    await journal.close()


async def test_a_rollout_that_cannot_be_encoded_does_not_stop_the_others(
    journal: SqliteJournal, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Unknown:
        """No record of the core."""

    wrong = EntriesAppended("a", [Entry(2, 1.0, Unknown())])  # type: ignore[arg-type]
    for uid in "ab":
        journal.write(accepted(uid))
        journal.write(appended(uid, 1, 1))
    await journal.flush()
    committed = asyncio.Event()
    journal.write(wrong, committed.set)
    journal.write(appended("b", 2, 2))
    await journal.flush()
    assert committed.is_set()
    assert journal.problem == ""
    journal.write(appended("a", 3, 3))
    await journal.flush()
    await journal.close()
    assert [rollout.start.uid for rollout in await stored(directory)] == ["b"]
    assert caplog.text.count("rollout a cannot be encoded") == 1
