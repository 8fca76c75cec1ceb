"""The journal on a disk: rollouts that survive the process, in an SQLite database.

`SqliteJournal` implements the port of the runtime. `writer` groups changes into commits on the event loop, `batch` turns them into
rows, `database` commits them in the journal's one thread, `stored` reads them back, `dropping` removes damaged ones, `files`
has the directory with its lock and key, and `schema` the tables. `records` and `starts` encode what is stored (osmosis.journal.v1).
"""

from rollout_server.edge.journal.journal import SqliteJournal

__all__ = ["SqliteJournal"]
