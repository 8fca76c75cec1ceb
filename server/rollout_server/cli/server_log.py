"""What the server says while a command plays rollouts, an author's fault at the author's own line."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_MOST = 50


class _ServerLogHandler(logging.Handler):
    """Tells each remark once: a thousand rollouts fail for the same reason."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console
        self._told: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Prints one record."""
        from rich.text import Text

        from rollout_server.inspection.escape import visible_lines

        text = visible_lines(_told(record))
        if text in self._told or len(self._told) >= _MOST:
            return
        self._told.add(text)
        self._console.print(Text(text, "red" if record.levelno >= logging.ERROR else "yellow"), soft_wrap=True)


@contextmanager
def remarking(console: Console) -> Iterator[None]:
    """Until the end of the block, warnings and errors go to the console."""
    root, remarks = logging.getLogger(), _ServerLogHandler(console)
    before, level = root.handlers[:], root.level
    root.handlers[:] = [remarks]
    root.setLevel(logging.WARNING)
    try:
        yield
    finally:
        root.handlers[:] = before
        root.setLevel(level)


def _told(record: logging.LogRecord) -> str:
    from rollout_server.authoring.author_traceback import mistake_in

    error = record.exc_info[1] if record.exc_info else None
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if error is None:
        return record.getMessage()
    mistake = mistake_in(error.__cause__ if isinstance(error.__cause__, SystemExit) else error, "")
    return f"{record.getMessage()}: {str(mistake).removeprefix(': ')}"
