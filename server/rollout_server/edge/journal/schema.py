"""Tables of the journal, and the migrations between their versions.

Only types and statements that PostgreSQL has as well are used here. What is particular to SQLite is in `database`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Double,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    insert,
)

_metadata = MetaData()
# SQLite gives an integer key its fast form only if the type is called INTEGER, which there has 64 bits.
_Number = BigInteger().with_variant(Integer(), "sqlite")

META: Final = Table(
    "meta",
    _metadata,
    Column("name", Text, primary_key=True),
    Column("value", Text, nullable=False),
)
"""Facts about the journal itself. `server_id` is the beginning of all its uids."""

ROLLOUTS: Final = Table(
    "rollouts",
    _metadata,
    # The order of acceptance. The journal counts it itself: the rows of one commit are then one statement.
    Column("number", _Number, primary_key=True, autoincrement=False),
    Column("uid", Text, nullable=False, unique=True),
    Column("start", LargeBinary, nullable=False),
    Column("credentials", LargeBinary),
    Column("received", Boolean, nullable=False),
    Column("cancelled", LargeBinary),
    Column("key_digest", LargeBinary),
    Column("start_crc32", _Number),
)
"""Accepted rollouts.

`credentials` are encrypted, NULL if there are none. `received`: the outcome was acknowledged. `cancelled` is the reason of a caller
that has cancelled the rollout, in UTF-8. `key_digest` has those of the keys of its model endpoint:
at most 16 SHA-256 digests in a row.

`start_crc32` and its like in other tables are `values.checksum` of these bytes, NULL in rows of version 3 and older. SQLite notices
damage to its own structure, but not a changed bit in a token or a text.
"""

ENTRIES: Final = Table(
    "entries",
    _metadata,
    Column("rollout", _Number, nullable=False),
    Column("first_sequence", _Number, nullable=False),
    Column("last_sequence", _Number, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    Column("payload_crc32", _Number),
    PrimaryKeyConstraint("rollout", "first_sequence"),
)
"""Logs. A row has all records that one rollout added in one commit, `rollout` is its number."""

DELIVERIES: Final = Table(
    "deliveries",
    _metadata,
    Column("rollout", _Number, primary_key=True, autoincrement=False),
    Column("state", Text, nullable=False),
    Column("attempts", _Number, nullable=False),
    Column("error", Text, nullable=False),
    Column("next_attempt", Double),
    Column("ended", Double),
    Column("expires", Double, nullable=False),
)
"""State of the deliveries of outcomes. It changes with each attempt. Times are in seconds since 1970."""

OUTCOMES: Final = Table(
    "outcomes",
    _metadata,
    Column("rollout", _Number, primary_key=True, autoincrement=False),
    Column("key", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("body_crc32", _Number),
)
"""What the deliveries send. Apart from `deliveries`, so that an attempt does not write a large body again."""

GROUPS: Final = Table(
    "groups",
    _metadata,
    # From the same count as the numbers of rollouts.
    Column("number", _Number, primary_key=True, autoincrement=False),
    Column("payload", LargeBinary, nullable=False),
    Column("payload_crc32", _Number),
)
"""Groups of rollouts as they were formed."""

REFILLS: Final = Table(
    "refills",
    _metadata,
    Column("group_number", _Number, nullable=False),
    Column("number", _Number, nullable=False),
    Column("group_index", _Number, nullable=False),
    Column("member", Text, nullable=False),
    PrimaryKeyConstraint("group_number", "number"),
)
"""Rollouts of a group that were started in place of others."""

Migration = Callable[[Connection], None]


def _add_groups(connection: Connection) -> None:
    """Version 2: groups, cancels that were answered, and keys of model endpoints."""
    number, payload = GROUPS.c.number.type, GROUPS.c.payload.type
    # As it was then: a later migration adds the other columns.
    Table(
        "groups", MetaData(), Column("number", number, primary_key=True), Column("payload", payload, nullable=False)
    ).create(connection)
    REFILLS.create(connection)
    _add_columns(connection, ROLLOUTS.c.cancelled, ROLLOUTS.c.key_digest)


def _add_columns(connection: Connection, *columns: Column[Any]) -> None:
    for column in columns:
        kind = column.type.compile(connection.dialect)
        connection.exec_driver_sql(f"ALTER TABLE {column.table.name} ADD COLUMN {column.name} {kind}")


def _store_prompts_once(_: Connection) -> None:
    """Version 3: `Answered.reported_as_predicted`. Older rows stay as they are; a server of version 2 would not see the prompt."""


def _add_checksums(connection: Connection) -> None:
    """Version 4: checksums. Older rows have none."""
    columns = (ROLLOUTS.c.start_crc32, ENTRIES.c.payload_crc32, OUTCOMES.c.body_crc32, GROUPS.c.payload_crc32)
    _add_columns(connection, *columns)


MIGRATIONS: Final[Sequence[Migration]] = (_add_groups, _store_prompts_once, _add_checksums)
"""Migrations in order. The first one turns version 1 into version 2."""


def latest_version(migrations: Sequence[Migration] = MIGRATIONS) -> int:
    """Return the version of the tables after all migrations."""
    return len(migrations) + 1


def create_tables(connection: Connection) -> None:
    """Create the tables of the newest version for a server with a new id."""
    _metadata.create_all(connection)
    connection.execute(insert(META), {"name": "server_id", "value": secrets.token_hex(5)})


def migrate(connection: Connection, version: int, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Bring tables of an older version up to date. The caller commits."""
    for migration in migrations[version - 1 :]:
        migration(connection)
