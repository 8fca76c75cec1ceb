"""SQL statements that turn the journal's tables of the newest version into those of older ones."""

from __future__ import annotations

from typing import Final

TO_VERSION_3: Final = (
    "ALTER TABLE rollouts DROP COLUMN start_crc32",
    "ALTER TABLE entries DROP COLUMN payload_crc32",
    "ALTER TABLE outcomes DROP COLUMN body_crc32",
    "ALTER TABLE groups DROP COLUMN payload_crc32",
    "PRAGMA user_version = 3",
)

TO_VERSION_1: Final = (
    *TO_VERSION_3,
    "DROP TABLE groups",
    "DROP TABLE refills",
    "ALTER TABLE rollouts DROP COLUMN cancelled",
    "ALTER TABLE rollouts DROP COLUMN key_digest",
    "PRAGMA user_version = 1",
)
