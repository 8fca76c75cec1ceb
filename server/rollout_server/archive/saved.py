"""The archive of files and directories that a user names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

from rollout_server.archive.archive import Archive, SavedRollout, Unreadable
from rollout_server.archive.files import FileRollout, saved_in
from rollout_server.archive.journal import SavedJournal, is_journal


@contextmanager
def open_archive(paths: Sequence[Path], report: Callable[[str], None]) -> Iterator[Archive]:
    """Yield the rollouts in files, in directories of such files, and in directories of journals.

    `report` receives the reason why a file of a directory is left out. Raises `Unreadable` for a file that is named and cannot be
    read, and for a directory without rollouts.
    """
    found: list[SavedRollout] = []
    with ExitStack() as stack:
        for path in paths:
            if not path.exists():
                raise Unreadable(f"{path} does not exist")
            if is_journal(path):
                journal = SavedJournal(path)
                stack.callback(journal.close)
                found += journal.open()
            else:
                found += _directory(path, report) if path.is_dir() else saved_in(path)
        yield Archive([*_distinct(found)])


def _distinct(found: Sequence[SavedRollout]) -> Iterator[SavedRollout]:
    """Yield the rollouts, with numbers at the ends of uids that different ones would share."""
    origins = [each.origin if isinstance(each, FileRollout) else each.uid for each in found]
    uids: dict[tuple[str, str], str] = {}
    taken: set[str] = {each.uid for each, origin in zip(found, origins, strict=True) if origin == each.uid}
    numbers = defaultdict[str, Iterator[int]](lambda: count(2))
    for each, origin in zip(found, origins, strict=True):
        if not isinstance(each, FileRollout) or origin == each.uid:
            yield each
            continue
        key = each.uid, origin
        if key not in uids:
            uid = each.uid
            while uid in taken:
                uid = f"{each.uid[:56]}-{next(numbers[each.uid])}"
            taken.add(uid)
            uids[key] = uid
        yield replace(each, uid=uids[key])


def _directory(path: Path, report: Callable[[str], None]) -> list[SavedRollout]:
    """Return the rollouts of a directory's files, the oldest file first."""
    found: list[SavedRollout] = []
    files = [each for each in path.iterdir() if each.is_file() and not each.name.startswith(".")]
    for each in sorted(files, key=lambda file: (file.stat().st_mtime, file.name)):
        try:
            found += saved_in(each)
        except Unreadable as error:
            report(f"left out: {error}")
    if not found:
        raise Unreadable(f"{path} has no file with rollouts, and it is not the directory of a journal")
    return found
