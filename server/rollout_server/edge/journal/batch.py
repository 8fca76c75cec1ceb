"""Changes of one commit as rows. All changes of one rollout become at most one row of each of its tables."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from cryptography.fernet import Fernet
from sqlalchemy import ColumnElement, Delete, Insert, Update, bindparam, delete, insert, true, update
from sqlalchemy.dialects import sqlite

from rollout_server.edge.journal.records import encode_entries
from rollout_server.edge.journal.schema import DELIVERIES, ENTRIES, GROUPS, OUTCOMES, REFILLS, ROLLOUTS
from rollout_server.edge.journal.starts import encode_credentials, encode_group, encode_start
from rollout_server.edge.journal.values import checksum, encode_text
from rollout_server.runtime.journal import (
    AcceptedStart,
    CancelRequested,
    Change,
    CredentialsChanged,
    DeliveryChanged,
    EntriesAppended,
    FormedGroup,
    GroupDropped,
    GroupFormed,
    GroupGrew,
    KeyMinted,
    OutcomeReceived,
    RolloutAccepted,
    RolloutDropped,
    StoredDelivery,
)
from rollout_server.runtime.log import Entry
from rollout_server.runtime.ports import Credentials

_log = logging.getLogger(__name__)

Row: TypeAlias = Mapping[str, Any]

_NUMBER: Final = "of"
_DIALECT: Final = sqlite.dialect(paramstyle="named")


def _text(statement: Insert | Update | Delete, columns: Iterable[str] = ()) -> str:
    """Return the SQL of a statement. Executing the text costs half of what executing the statement does."""
    return str(statement.compile(dialect=_DIALECT, column_keys=[*columns] or None))


def _delete(column: ColumnElement[Any]) -> str:
    return _text(delete(column.table).where(column == bindparam(_NUMBER)))


def _set(**values: Any) -> str:
    return _text(update(ROLLOUTS).where(ROLLOUTS.c.number == bindparam(_NUMBER)).values(**values))


_DELETE: Final = tuple(map(_delete, (ROLLOUTS.c.number, ENTRIES.c.rollout, DELIVERIES.c.rollout, OUTCOMES.c.rollout)))
_ACCEPT: Final = _text(insert(ROLLOUTS), ("number", "uid", "start", "start_crc32", "credentials", "received"))
_APPEND: Final = _text(insert(ENTRIES))
_CREDENTIALS: Final = _set(credentials=bindparam("encrypted"))
_CANCELLED: Final = _set(cancelled=bindparam("reason"))
_KEY: Final = _set(key_digest=bindparam("digest"))
_RECEIVED: Final = _set(received=true())
_DROP_GROUP: Final = tuple(map(_delete, (GROUPS.c.number, REFILLS.c.group_number)))
_FORM: Final = _text(insert(GROUPS))
_REFILL: Final = _text(insert(REFILLS))
_inserted = sqlite.insert(DELIVERIES)
_DELIVERY: Final = _text(
    _inserted.on_conflict_do_update(
        index_elements=[DELIVERIES.c.rollout],
        set_={
            name: _inserted.excluded[name]
            for name in ("state", "attempts", "error", "next_attempt", "ended", "expires")
        },
    )
)
# The body of a delivery never changes.
_OUTCOME: Final = _text(sqlite.insert(OUTCOMES).on_conflict_do_nothing(index_elements=[OUTCOMES.c.rollout]))


class Batch:
    """The changes of one commit. Only the state after all of them is written, since nobody can see one in between.

    Args:
        changes: each with the number of its rollout or group.
        key: encrypts credentials.
    """

    def __init__(self, changes: Sequence[tuple[int, Change]], key: Fernet) -> None:
        self._key = key
        self._uids: dict[int, str] = {}
        self._accepted: dict[int, AcceptedStart] = {}
        self._entries: dict[int, list[Entry]] = {}
        self._credentials: dict[int, Credentials] = {}
        self._deliveries: dict[int, StoredDelivery] = {}
        self._cancelled: dict[int, str] = {}
        self._keys: dict[int, bytes] = {}
        self._received: set[int] = set()
        self._dropped: set[int] = set()
        self._formed: dict[int, FormedGroup] = {}
        self._refills: list[tuple[int, GroupGrew]] = []
        self._dropped_groups: set[int] = set()
        self.unencodable: set[int] = set()
        """Numbers of rollouts that have something that cannot be encoded. Nothing of them is written any more."""
        for number, change in changes:
            self._add(number, change)
        self._statements = self._encode()

    def write(self, connection: sqlite3.Connection) -> None:
        """Execute the statements in the transaction of the caller."""
        for statement, rows in self._statements:
            if rows:
                connection.executemany(statement, rows)

    def _add(self, number: int, change: Change) -> None:
        match change:
            case EntriesAppended():
                self._uids[number] = change.uid
                self._entries.setdefault(number, []).extend(change.entries)
            case RolloutAccepted():
                self._uids[number] = change.start.uid
                self._accepted[number] = change.start
            case CredentialsChanged():
                self._uids[number] = change.uid
                self._credentials[number] = change.credentials
            case CancelRequested():
                self._cancelled[number] = change.reason
            case KeyMinted():
                self._keys[number] = change.digests
            case DeliveryChanged():
                self._deliveries[number] = change.stored
            case OutcomeReceived():
                self._received.add(number)
            case RolloutDropped():
                self._drop(number)
            case GroupFormed():
                self._formed[number] = change.group
            case GroupGrew():
                self._refills.append((number, change))
            case GroupDropped():
                self._dropped_groups.add(number)

    def _drop(self, number: int) -> None:
        for changes in (
            self._accepted,
            self._entries,
            self._credentials,
            self._deliveries,
            self._cancelled,
            self._keys,
        ):
            changes.pop(number, None)
        self._received.discard(number)
        self._dropped.add(number)

    def _encode(self) -> Sequence[tuple[str, Sequence[Row]]]:
        accepted: list[Row] = []
        entries: list[Row] = []
        credentials: list[Row] = []
        for number in sorted({*self._accepted, *self._entries, *self._credentials}):
            try:
                rows = self._accepted_rows(number), self._entry_rows(number), self._credential_rows(number)
            except Exception:  # a bug in the encoding; one rollout must not keep all others from being stored
                _log.exception(
                    "rollout %s cannot be encoded for the journal; a restart would lose it", self._uids[number]
                )
                self.unencodable.add(number)
                self._drop(number)
                continue
            accepted += rows[0]
            entries += rows[1]
            credentials += rows[2]
        dropped = [{_NUMBER: number} for number in self._dropped]
        return (
            *((statement, dropped) for statement in _DELETE),
            (_ACCEPT, accepted),
            (_APPEND, entries),
            (_CREDENTIALS, credentials),
            (
                _CANCELLED,
                [{_NUMBER: number, "reason": encode_text(reason)} for number, reason in self._cancelled.items()],
            ),
            (_KEY, [{_NUMBER: number, "digest": digest or None} for number, digest in self._keys.items()]),
            (_RECEIVED, [{_NUMBER: number} for number in self._received]),
            (_DELIVERY, [_delivery_row(number, stored) for number, stored in self._deliveries.items()]),
            (_OUTCOME, [_outcome_row(number, stored) for number, stored in self._deliveries.items()]),
            *self._encode_groups(),
        )

    def _encode_groups(self) -> Sequence[tuple[str, Sequence[Row]]]:
        """Return the statements of groups. A group may be formed and dropped in the same commit."""
        return (
            (_FORM, [_group_row(number, group) for number, group in self._formed.items()]),
            (_REFILL, [_refill_row(number, grew) for number, grew in self._refills]),
            *((statement, [{_NUMBER: number} for number in self._dropped_groups]) for statement in _DROP_GROUP),
        )

    def _accepted_rows(self, number: int) -> Sequence[Row]:
        start = self._accepted.get(number)
        if start is None:
            return ()
        payload = encode_start(start)
        row = {
            "number": number,
            "uid": start.uid,
            "start": payload,
            "start_crc32": checksum(number, payload),
            "credentials": self._encrypted(start.request.credentials),
            "received": False,
        }
        return (row,)

    def _entry_rows(self, number: int) -> Sequence[Row]:
        entries = self._entries.get(number)
        if not entries:
            return ()
        payload = encode_entries(entries)
        row = {
            "rollout": number,
            "first_sequence": entries[0].sequence,
            "last_sequence": entries[-1].sequence,
            "payload": payload,
            "payload_crc32": checksum(number, payload),
        }
        return (row,)

    def _credential_rows(self, number: int) -> Sequence[Row]:
        credentials = self._credentials.get(number)
        return () if credentials is None else ({_NUMBER: number, "encrypted": self._encrypted(credentials)},)

    def _encrypted(self, credentials: Credentials) -> bytes | None:
        if not credentials.secrets():
            return None
        return self._key.encrypt(encode_credentials(credentials))


def _delivery_row(number: int, stored: StoredDelivery) -> Row:
    delivery = stored.delivery
    return {
        "rollout": number,
        "state": delivery.state.value,
        "attempts": delivery.attempts,
        # A receiver's text may have half of a surrogate pair, which no database stores.
        "error": delivery.error.encode("utf-8", "backslashreplace").decode("utf-8"),
        "next_attempt": delivery.next_attempt,
        "ended": delivery.ended,
        "expires": stored.expires,
    }


def _outcome_row(number: int, stored: StoredDelivery) -> Row:
    return {"rollout": number, "key": stored.key, "body": stored.body, "body_crc32": checksum(number, stored.body)}


def _group_row(number: int, group: FormedGroup) -> Row:
    payload = encode_group(group)
    return {"number": number, "payload": payload, "payload_crc32": checksum(number, payload)}


def _refill_row(number: int, grew: GroupGrew) -> Row:
    return {"group_number": number, "number": grew.number, "group_index": grew.index, "member": grew.member}
