"""Errors in an author's code, with the author's file and line instead of a traceback through this package."""

from __future__ import annotations

import re
import sysconfig
import traceback
from pathlib import Path

# Errors of this package may end with the source location of the object that they are about.
_LOCATION = re.compile(r" \((?P<file>[^()]+\.py):(?P<line>[0-9]+)\)$")
_OURS = Path(__file__).resolve().parents[1]
_INSTALLED = tuple(Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib", "purelib", "platlib"))


class AuthorError(ValueError):
    """An error that the author of an agent or a dataset can fix. `file` and `line` locate it; empty and 0 if unknown."""

    def __init__(self, text: str, file: str = "", line: int = 0) -> None:
        where = f"{file}:{line}: " if file and line else f"{file}: " if file else ""
        super().__init__(where + text)
        self.text = text
        self.file = file
        self.line = line


def author_error(error: BaseException, source: str) -> AuthorError:
    """Convert an exception of an author's code. `source` names it if no line of the author's is in the traceback."""
    if isinstance(error, SyntaxError) and error.filename:
        return AuthorError(f"{type(error).__name__}: {error.msg}", short_path(error.filename), error.lineno or 0)
    file, line, is_last = _line_of(error)
    text = " ".join(str(error).split()) or "the exception has no message"
    if (location := _LOCATION.search(text)) is not None:
        text, file, line = text[: location.start()], short_path(location["file"]), int(location["line"])
    # Errors of this package's checks are whole sentences. An exception of the author's own code needs its type.
    message = text if not is_last and isinstance(error, TypeError | ValueError) else f"{type(error).__name__}: {text}"
    return AuthorError(message, file, line) if file else AuthorError(f"{source}: {message}")


def is_author_file(filename: str) -> bool:
    """Return whether a file belongs neither to this package, nor to Python, nor to an installed package."""
    if filename.startswith("<"):
        return False
    path = Path(filename).resolve()
    return not any(path.is_relative_to(each) for each in (_OURS, *_INSTALLED))


def _line_of(error: BaseException) -> tuple[str, int, bool]:
    frames = traceback.extract_tb(error.__traceback__)
    for index, frame in enumerate(reversed(frames)):
        if is_author_file(frame.filename):
            return short_path(frame.filename), frame.lineno or 0, index == 0
    return "", 0, False


def short_path(filename: str) -> str:
    """Return a path relative to the working directory if it is below it, else absolute."""
    path = Path(filename).resolve()
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
