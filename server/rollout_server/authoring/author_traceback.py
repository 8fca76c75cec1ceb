"""An author's mistake, told by file and line: our own frames help nobody to mend it."""

from __future__ import annotations

import re
import sysconfig
import traceback
from pathlib import Path

# Checks of ours may say where what they speak of was written.
_LOCATION = re.compile(r" \((?P<file>[^()]+\.py):(?P<line>[0-9]+)\)$")
_OURS = Path(__file__).resolve().parents[1]
_INSTALLED = tuple(Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib", "purelib", "platlib"))


class AuthorError(ValueError):
    """Something that the author of an agent or a dataset can mend. `file` and `line` say where; empty and 0: not known."""

    def __init__(self, text: str, file: str = "", line: int = 0) -> None:
        where = f"{file}:{line}: " if file and line else f"{file}: " if file else ""
        super().__init__(where + text)
        self.text = text
        self.file = file
        self.line = line


def author_error(error: BaseException, source: str) -> AuthorError:
    """What an author's code raised, at the author's own line; `source` is named where no such line is in the traceback."""
    if isinstance(error, SyntaxError) and error.filename:
        return AuthorError(f"{type(error).__name__}: {error.msg}", short_path(error.filename), error.lineno or 0)
    file, line, is_last = _line_of(error)
    text = " ".join(str(error).split()) or "no reason was given"
    if (location := _LOCATION.search(text)) is not None:
        text, file, line = text[: location.start()], short_path(location["file"]), int(location["line"])
    # A check of ours says what is wrong in whole sentences; what the author's code raised has a kind.
    message = text if not is_last and isinstance(error, TypeError | ValueError) else f"{type(error).__name__}: {text}"
    return AuthorError(message, file, line) if file else AuthorError(f"{source}: {message}")


def is_author_file(filename: str) -> bool:
    """Whether a file is neither ours, nor Python's, nor an installed package's."""
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
    """A path as one would type it here."""
    path = Path(filename).resolve()
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
