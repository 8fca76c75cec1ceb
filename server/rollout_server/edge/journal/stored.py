"""Reads the rollouts and groups of earlier processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Final

from cryptography.fernet import Fernet, InvalidToken
from sqlalchemy import Connection, Row, select

from rollout_server.edge.journal.files import RESTORE, remove_advice
from rollout_server.edge.journal.records import decode_entries
from rollout_server.edge.journal.schema import DELIVERIES, ENTRIES, GROUPS, OUTCOMES, REFILLS, ROLLOUTS
from rollout_server.edge.journal.starts import decode_credentials, decode_group, decode_start
from rollout_server.edge.journal.values import checksum, decode_text
from rollout_server.runtime.journal import AcceptedStart, JournalUnusable, StoredDelivery, StoredGroup, StoredRollout
from rollout_server.runtime.log import Entry
from rollout_server.runtime.outcome_delivery import Delivery, DeliveryState

_CHUNK: Final = 256
"""Number of rollouts whose rows are in memory beside the decoded ones."""

_ROLLOUTS: Final = (
    select(
        *ROLLOUTS.c,
        *(column for column in DELIVERIES.c if column.name != "rollout"),
        *(column for column in OUTCOMES.c if column.name != "rollout"),
    )
    .outerjoin(DELIVERIES, DELIVERIES.c.rollout == ROLLOUTS.c.number)
    .outerjoin(OUTCOMES, OUTCOMES.c.rollout == ROLLOUTS.c.number)
    .order_by(ROLLOUTS.c.number)
)


@dataclass(frozen=True, slots=True)
class StoredReader:
    """Decodes what the database at `path` has. Raises `JournalUnusable` if a rollout is damaged or the key is another one.

    `key`: None leaves out the credentials.
    """

    path: Path
    key: Fernet | None

    def rollouts(
        self, connection: Connection, numbers: tuple[int, int] | None = None
    ) -> Iterator[tuple[int, StoredRollout]]:
        """Yield each rollout with its number, in the order of acceptance. `numbers`: only those from the first to the second."""
        chosen = _ROLLOUTS if numbers is None else _ROLLOUTS.where(ROLLOUTS.c.number.between(*numbers))
        rows = connection.execute(chosen.execution_options(yield_per=_CHUNK))
        for chunk in rows.partitions():
            logs = _logs(connection, chunk[0].number, chunk[-1].number)
            for row in chunk:
                yield row.number, self._rollout(row, logs[row.number])

    def groups(self, connection: Connection) -> Iterator[tuple[int, StoredGroup]]:
        """Yield each group with its number, in the order in which they were formed."""
        refills: dict[int, list[tuple[int, str]]] = defaultdict(list)
        for row in connection.execute(select(REFILLS).order_by(REFILLS.c.number)):
            refills[row.group_number].append((row.group_index, row.member))
        for row in connection.execute(select(GROUPS).order_by(GROUPS.c.number)):
            try:
                group = decode_group(_checked(row.number, row.payload, row.payload_crc32, "payload"))
            except ValueError as error:
                text = f"{self.path} is damaged: group {row.number} cannot be read ({error}). Please {RESTORE}"
                raise JournalUnusable(text) from error
            yield row.number, StoredGroup(group, refills[row.number])

    def _rollout(self, row: Row[Any], log: Sequence[Row[Any]]) -> StoredRollout:
        try:
            entries = [*chain.from_iterable(map(_entries, log))]
            start = self._start(row)
            delivery = _delivery(row)
            if start.uid != row.uid:
                raise ValueError(f"it was accepted as {start.uid}")
            cancelled = None if row.cancelled is None else decode_text(row.cancelled)
        except InvalidToken:
            text = (
                f"the credentials in {self.path} were encrypted with another key: set ROLLOUT_JOURNAL_KEY to the key with which "
                "they were stored, or, if it was not set then, unset it and put the file `key` of the journal's directory back. "
                f"If the key is lost, {remove_advice(self.path.parent, row.uid)}"
            )
            raise JournalUnusable(text) from None
        except Exception as error:  # whatever the bytes of a damaged file make the decoder raise
            text = f"{self.path} is damaged: rollout {row.uid} cannot be read ({type(error).__name__}: {error})"
            raise JournalUnusable(f"{text}. {self._drop(row.uid)}") from error
        self._check_log(row.uid, entries)
        digest = row.key_digest or b""
        return StoredRollout(start, entries, bool(row.received), delivery, cancelled, digest)

    def _start(self, row: Row[Any]) -> AcceptedStart:
        start = decode_start(_checked(row.number, row.start, row.start_crc32, "start"))
        if row.credentials is None or self.key is None:
            return start
        credentials = decode_credentials(self.key.decrypt(row.credentials))
        return replace(start, request=replace(start.request, credentials=credentials))

    def _check_log(self, uid: str, entries: Sequence[Entry]) -> None:
        """Resuming from a log with a gap would publish sequence numbers that earlier stood for other records."""
        for expected, entry in enumerate(entries, start=1):
            if entry.sequence != expected:
                text = f"the log of rollout {uid} has record {entry.sequence} where {expected} is expected"
                raise JournalUnusable(f"{self.path} is damaged: {text}. {self._drop(uid)}")

    def _drop(self, uid: str) -> str:
        """Return what to do about a rollout that is damaged."""
        return f"Please restore it from a backup, or {remove_advice(self.path.parent, uid)}"


def _logs(connection: Connection, first: int, last: int) -> dict[int, list[Row[Any]]]:
    """Return the rows with the logs of the rollouts with these numbers, by number."""
    rows = select(ENTRIES).where(ENTRIES.c.rollout.between(first, last))
    logs: dict[int, list[Row[Any]]] = defaultdict(list)
    for row in connection.execute(rows.order_by(ENTRIES.c.rollout, ENTRIES.c.first_sequence)):
        logs[row.rollout].append(row)
    return logs


def _entries(row: Row[Any]) -> list[Entry]:
    text = f"records {row.first_sequence} to {row.last_sequence}"
    return decode_entries(_checked(row.rollout, row.payload, row.payload_crc32, text))


def _checked(number: int, data: bytes, crc32: int | None, what: str) -> bytes:
    """Return the bytes as they were written. Raises ValueError if they were changed since, if they have a checksum."""
    if crc32 is not None and checksum(number, data) != crc32:
        raise ValueError(f"{what}: the bytes on the disk do not match their checksum")
    return data


def _delivery(row: Row[Any]) -> StoredDelivery | None:
    if row.state is None:
        return None
    delivery = Delivery(DeliveryState(row.state), row.attempts, row.error, row.next_attempt, row.ended)
    return StoredDelivery(
        delivery, row.key, row.expires, bytes(_checked(row.number, row.body, row.body_crc32, "outcome"))
    )
