"""The journal of a stopped server: every rollout and event as the server had them, and nothing in the directory changes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollout_server.archive.archive import Unreadable, basic
from rollout_server.archive.document import document_of
from rollout_server.archive.journal import SavedJournal
from rollout_server.edge.journal.files import JournalDirectory

from tests.archive.conftest import TOKEN, OpenSaved, Recorded
from tests.support.journal_versions import TO_VERSION_1
from tests.support.processes import ANY_PORTS, Serving, environment, started


def contents(directory: Path) -> dict[str, tuple[str, int, int]]:
    """The files of a directory, with their contents, modes and times."""
    found = {}
    for path in sorted(directory.iterdir()):
        stat = path.stat()
        found[path.name] = sha256(path.read_bytes()).hexdigest(), stat.st_mode, stat.st_mtime_ns
    return found


async def events(client: Any, uid: str) -> list[dict[str, Any]]:
    reply = await client.get(f"/v1/rollouts/{uid}/events", params={"detail": "full"})
    return [json.loads(line.removeprefix("data: ")) for line in reply.text.split("\n") if line.startswith("data: ")]


async def test_all_is_as_the_server_returned_it(recorded: Recorded, open_saved: OpenSaved) -> None:
    before = contents(recorded.journal)
    client = await open_saved(recorded.journal)
    for rollout, wanted in zip(recorded.rollouts, recorded.events, strict=True):
        uid = rollout["uid"]
        assert (await client.get(f"/v1/rollouts/{uid}", params={"view": "full"})).json() == rollout
        assert await events(client, uid) == wanted
    listed = (await client.get("/v1/rollouts")).json()["rollouts"]
    assert [each["uid"] for each in listed] == [each["uid"] for each in reversed(recorded.rollouts)]
    assert contents(recorded.journal) == before


def test_a_list_reads_several_rollouts_at_once(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = SavedJournal(recorded.journal)
    saved = journal.open()
    expected = [basic(each.read().rollout) for each in saved]
    connections = list[int]()
    connection = SavedJournal.connection
    monkeypatch.setattr(SavedJournal, "connection", lambda self: connections.append(1) or connection(self))
    assert [each.summary() for each in reversed(saved)] == expected[::-1]
    assert len(connections) == 1
    assert [each.summary() for each in saved] == expected


async def test_it_selects_as_the_server_does(recorded: Recorded, open_saved: OpenSaved) -> None:
    client = await open_saved(recorded.journal)

    async def found(**query: Any) -> list[str]:
        page = (await client.get("/v1/rollouts", params=query)).json()
        return [each["spec"]["rollout_id"] for each in page["rollouts"]]

    assert await found(agent="calculator") == ["two", "one"]
    assert await found(group_id="sums") == ["two", "one"]
    assert await found(label="split=train") == ["tour"]
    assert await found(failure_class="trainer") == ["fails"]
    assert await found(text="PLUM") == ["tour"]
    assert await found(text="no such text") == await found(text="content") == await found(text="assistant") == []
    assert (await client.get("/v1/rollouts", params={"text": "x" * 257})).status_code == 422
    assert await found(state="running") == []
    page = (await client.get("/v1/rollouts", params={"page_size": 3})).json()
    rest = (await client.get("/v1/rollouts", params={"page_size": 3, "page_token": page["next_page_token"]})).json()
    assert [len(each["rollouts"]) for each in (page, rest)] == [3, 1]
    group = (await client.get("/v1/groups/sums")).json()
    assert [each["rollout_id"] for each in group["members"]] == ["one", "two"]
    assert [each["name"] for each in (await client.get("/v1/agents")).json()["agents"]] == ["calculator", "tour"]


async def test_nothing_can_be_changed(recorded: Recorded, open_saved: OpenSaved) -> None:
    client = await open_saved(recorded.journal)
    uid = recorded.rollouts[0]["uid"]
    assert "read_only" in (await client.get("/v1/server")).json()["features"]
    start = {"messages": [{"role": "user", "content": "x"}], "completions": {"url": "grpc://127.0.0.1:9"}}
    for path, body in (
        ("/v1/rollouts", start),
        (f"/v1/rollouts/{uid}/cancel", {}),
        ("/v1/rollouts/cancel", {"all": True}),
    ):
        reply = await client.post(path, json=body)
        assert reply.is_client_error
        assert reply.json()["error"]["code"] == "READ_ONLY"


async def test_a_killed_server_leaves_what_it_had_stored(tmp_path: Path, open_saved: OpenSaved) -> None:
    env = environment(ROLLOUT_JOURNAL="journal")
    journal = tmp_path / "journal"
    start = {"rollout_id": "open", "messages": [{"role": "user", "content": "Go."}]}
    target = {"url": "grpc://127.0.0.1:9", "bearer": TOKEN}
    async with started(Serving, "serve", *ANY_PORTS, cwd=tmp_path, env=env) as server:
        async with httpx.AsyncClient(base_url=server.url, trust_env=False) as http:
            # A port where nothing listens: the rollout retries for a while.
            reply = await http.post("/v1/rollouts", json={**start, "completions": target})
            uid = reply.json()["rollout"]["uid"]
        with pytest.raises(Unreadable, match=r"is in use: .* `rollout view URL`"):
            SavedJournal(journal).open()
        server.send(signal.SIGKILL)
        await server.ended()
    assert (journal / "journal.sqlite3-wal").stat().st_size
    (journal / "key").unlink()  # the credentials are stored, and not needed
    before = contents(journal)
    client = await open_saved(journal)
    reply = await client.get(f"/v1/rollouts/{uid}", params={"view": "full"})
    rollout = reply.json()
    assert TOKEN not in reply.text
    assert rollout["spec"]["messages"] == start["messages"]
    assert rollout["state"] in ("queued", "running", "finished")
    assert contents(journal) == before


def test_a_server_that_starts_while_a_journal_is_copied_is_not_kept_out(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = recorded.journal / "journal.sqlite3"
    Path(f"{database}-wal").write_bytes(b"changes")

    def copy(source: str, target: str) -> None:
        Path(target).write_bytes(Path(source).read_bytes())
        directory = JournalDirectory(recorded.journal)
        directory.open()
        directory.close()
        os.utime(database)

    monkeypatch.setattr(shutil, "copyfile", copy)
    saved = SavedJournal(recorded.journal)
    with pytest.raises(Unreadable, match="was changed meanwhile"):
        saved.open()
    saved.close()


async def test_older_tables_are_read_from_a_copy(recorded: Recorded, open_saved: OpenSaved) -> None:
    with sqlite3.connect(recorded.journal / "journal.sqlite3") as database:
        for statement in TO_VERSION_1:
            database.execute(statement)
    database.close()
    before = contents(recorded.journal)
    client = await open_saved(recorded.journal)
    uid = recorded.rollouts[0]["uid"]
    assert (await client.get(f"/v1/rollouts/{uid}", params={"view": "full"})).json() == recorded.rollouts[0]
    assert contents(recorded.journal) == before


def change(database: Path, *statements: str) -> None:
    with sqlite3.connect(database) as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


def test_what_is_no_journal_of_this_version_is_refused(recorded: Recorded) -> None:
    database = recorded.journal / "journal.sqlite3"
    for statement, text in (
        ("PRAGMA user_version = 99", "was written by a newer server: it has version 99"),
        ("PRAGMA application_id = 7", "but not a journal of this server"),
    ):
        change(database, statement)
        with pytest.raises(Unreadable, match=text):
            SavedJournal(recorded.journal).open()
    database.write_bytes(b"not a database")
    with pytest.raises(Unreadable, match="cannot be read"):
        SavedJournal(recorded.journal).open()


async def test_one_damaged_rollout_hides_no_others(recorded: Recorded, open_saved: OpenSaved) -> None:
    uid = recorded.rollouts[0]["uid"]
    change(recorded.journal / "journal.sqlite3", "UPDATE entries SET payload = x'00' WHERE rollout = 1")
    client = await open_saved(recorded.journal)
    first = (await client.get("/v1/rollouts")).json()["rollouts"][-1]
    assert (first["uid"], first["outcome"]["category"]) == (uid, "internal")
    assert "cannot be read: " in first["outcome"]["message"]
    found = (await client.get("/v1/rollouts", params={"text": "2 + 2"})).json()["rollouts"]
    assert [each["uid"] for each in found] == [recorded.rollouts[3]["uid"]]
    reply = await client.get(f"/v1/rollouts/{uid}")
    assert reply.json()["error"]["code"] == "UNREADABLE"
    reports: list[str] = []
    _, count = await document_of(client, (), reports.append)
    assert (count, [uid in text for text in reports]) == (3, [True])
    with pytest.raises(Unreadable):
        await document_of(client, [uid])


def test_what_is_damaged_in_a_copy_is_named_as_in_the_journal(recorded: Recorded, tmp_path: Path) -> None:
    killed, uid = tmp_path / "killed", recorded.rollouts[0]["uid"]
    with sqlite3.connect(recorded.journal / "journal.sqlite3") as connection:
        connection.execute("UPDATE entries SET payload = x'00' WHERE rollout = 1")
        connection.commit()
        shutil.copytree(recorded.journal, killed)  # SQLite's log has the change
    connection.close()
    saved = SavedJournal(killed)
    damaged = saved.open()[0]
    with pytest.raises(Unreadable) as caught:
        damaged.read()
    saved.close()
    assert str(caught.value).startswith(f"{killed / 'journal.sqlite3'} is damaged: rollout {uid}")
    assert str(caught.value).endswith(f"remove this rollout: rollout journal drop {killed} {uid}")
    (killed / "journal.sqlite3").write_bytes(b"not a database")
    with pytest.raises(Unreadable, match=re.escape(f"{killed / 'journal.sqlite3'} cannot be read")):
        SavedJournal(killed).open()


async def test_a_server_that_starts_meanwhile_is_noticed(
    recorded: Recorded, open_saved: OpenSaved, tmp_path: Path
) -> None:
    client = await open_saved(recorded.journal)
    shutil.copy(recorded.journal / "journal.sqlite3", tmp_path / "before")
    change(recorded.journal / "journal.sqlite3", "UPDATE rollouts SET received = 1")
    os.utime(recorded.journal / "journal.sqlite3")
    reply = await client.get(f"/v1/rollouts/{recorded.rollouts[0]['uid']}")
    assert "was changed meanwhile: a server uses it" in reply.json()["error"]["message"]
