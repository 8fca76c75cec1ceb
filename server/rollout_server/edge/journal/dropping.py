"""Removes rollouts from the journal of a stopped server, also those that cannot be read."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from cryptography.fernet import Fernet

from rollout_server.edge.journal.database import Database
from rollout_server.edge.journal.files import JournalDirectory
from rollout_server.runtime.journal import JournalUnavailable, JournalUnusable, RolloutDropped


def drop_rollouts(directory: Path, uids: Sequence[str]) -> list[str]:
    """Remove rollouts, all or none of them, and return their uids, each once.

    Raises RuntimeError if the journal cannot be used, or has no such rollout.
    """
    files = JournalDirectory(directory)
    try:
        if not files.has_database:
            raise RuntimeError(f"{files.path} has no journal")
        # Credentials are neither read nor written, so any key will do: rollouts whose key is lost can be removed, too.
        database = Database(files, Fernet.generate_key().decode())
        database.open()
        with closing(database):
            numbers = database.numbers(uids)
            if missing := [uid for uid in uids if uid not in numbers]:
                others = ", ".join(str(each) for each in sorted(files.path.glob("worker-*")))
                more = f"; further workers of the server have journals of their own: {others}" if others else ""
                raise RuntimeError(f"the journal {files.database} has no rollout {missing[0]}{more}")
            database.commit([(number, RolloutDropped(uid)) for uid, number in numbers.items()])
            return [*numbers]
    except (JournalUnusable, JournalUnavailable) as error:
        raise RuntimeError(str(error)) from error
