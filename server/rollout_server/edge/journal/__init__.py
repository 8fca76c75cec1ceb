"""The journal on a disk: rollouts that survive the process, in an SQLite file.

`SqliteJournal` implements the port of the runtime. `writer` groups changes into commits on the event loop, `batch` turns them into
rows, `database` commits them in the journal's one thread, `stored` reads them back, `files` has the lock and the key, and
`schema` the tables.
"""

from rollout_server.edge.journal.files import JournalUnusable
from rollout_server.edge.journal.journal import SqliteJournal

__all__ = ["JournalUnusable", "SqliteJournal"]
