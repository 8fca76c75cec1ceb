"""Journals of commands: `rollout serve` keeps one, private servers of other commands none; `rollout journal drop` repairs one."""

from __future__ import annotations

import os
import shlex
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from rollout_client import AsyncClient, NotFound

from tests.cli.conftest import Invoke
from tests.support.processes import ANY_PORTS, Serving, command, environment, started


def test_the_private_server_of_a_command_leaves_the_users_journal_alone(project: Path, invoke: Invoke) -> None:
    told = invoke(
        *("run", "agent.py", "--script", "scripted.py", "--prompt", "How many r are in strawberry?"),
        ROLLOUT_JOURNAL=str(project / "journal"),
    )
    assert told.exit_code == 0, told.output
    assert not (project / "journal").exists()


async def test_a_server_on_any_port_says_that_it_keeps_none(tmp_path: Path) -> None:
    async with started(Serving, "serve", *ANY_PORTS, cwd=tmp_path, env=environment()) as server:
        assert "rollouts are kept in memory and end with this process" in server.text


async def test_a_named_journal_outlives_the_process_and_belongs_to_one_server(tmp_path: Path) -> None:
    env = environment(ROLLOUT_JOURNAL="journal")
    async with started(Serving, "serve", *ANY_PORTS, cwd=tmp_path, env=env) as server:
        assert "kept in memory" not in server.text
        assert os.stat(tmp_path / "journal").st_mode & 0o777 == 0o700
        second = await command("serve", *ANY_PORTS, cwd=tmp_path, env=env)
        assert second.code == 1
        (line,) = second.err.splitlines()
        assert line.startswith("rollout serve: ROLLOUT_JOURNAL: ")
        assert "in use by another server" in line
        async with AsyncClient(f"127.0.0.1:{server.grpc_port}") as client:
            fields = {"messages": [{"role": "user", "content": "Go."}], "completions": "grpc://127.0.0.1:9"}
            uid = (await client.start(request_id="once", **fields)).uid
            ended = await client.wait(uid, timeout=60)
        server.send(signal.SIGKILL)
        await server.ended()
    async with (
        started(Serving, "serve", *ANY_PORTS, cwd=tmp_path, env=env) as server,
        AsyncClient(f"127.0.0.1:{server.grpc_port}") as client,
    ):
        found = await client.get(uid)
        assert (found.outcome, found.last_sequence) == (ended.outcome, ended.last_sequence)
        again = await client.start(request_id="once", **fields)
        assert (again.uid, again.attached) == (uid, True)


async def test_a_damaged_rollout_is_dropped_with_the_command_that_the_error_names(tmp_path: Path) -> None:
    env = environment(ROLLOUT_JOURNAL="my journal")
    async with started(Serving, "serve", *ANY_PORTS, cwd=tmp_path, env=env) as server:
        async with AsyncClient(f"127.0.0.1:{server.grpc_port}") as client:
            fields = {"messages": [{"role": "user", "content": "Go."}], "completions": "grpc://127.0.0.1:9"}
            damaged, whole = [member.uid for member in (await client.start_group(2, **fields)).group.members]
            ends = [(await client.wait(uid, timeout=60)).outcome for uid in (damaged, whole)]
        server.send(signal.SIGKILL)
        await server.ended()
    with closing(sqlite3.connect(tmp_path / "my journal" / "journal.sqlite3")) as database, database:
        [changed] = database.execute("SELECT start FROM rollouts WHERE uid = ?", (damaged,)).fetchone()
        database.execute("UPDATE rollouts SET start = ? WHERE uid = ?", (changed[:-1] + b"?", damaged))
    refused = await command("serve", *ANY_PORTS, cwd=tmp_path, env=env)
    named = shlex.split(refused.err.rpartition("or remove this rollout: ")[2])
    assert (refused.code, named) == (1, ["rollout", "journal", "drop", str(tmp_path / "my journal"), damaged])
    dropped = await command(*named[1:], damaged, cwd=tmp_path, env=env)
    assert (dropped.code, dropped.out) == (0, f"dropped {damaged}\n"), dropped.err
    again = await command(*named[1:], cwd=tmp_path, env=env)
    assert (again.code, again.out) == (1, "")
    assert again.err.endswith(f"has no rollout {damaged}\n")
    async with (
        started(Serving, "serve", *ANY_PORTS, cwd=tmp_path, env=env) as server,
        AsyncClient(f"127.0.0.1:{server.grpc_port}") as client,
    ):
        assert (await client.get(whole)).outcome == ends[1]
        assert (
            f"the journal does not have all of its rollouts ({damaged}); its rollouts go on one by one" in server.text
        )
        with pytest.raises(NotFound):
            await client.get(damaged)
