"""Where an author's code is, for messages that name file and line."""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

_OURS = str(Path(__file__).resolve().parents[1])
_INSTALLED = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")})


def written_at(function: Callable[..., object]) -> str:
    """File and line of a function, as " (file.py:3)"; empty where nobody knows."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""


def raised_at(error: BaseException) -> str:
    """File and line of the author's code that raised an error or led to it, as " at file.py:3"; empty where none did."""
    return _innermost(traceback.extract_tb(error.__traceback__))


def held_at(stack: traceback.StackSummary) -> str:
    """The same for what a thread is doing."""
    return _innermost(stack)


def is_authors(filename: str) -> bool:
    """Whether a file is neither ours, nor Python's, nor an installed package's."""
    return not filename.startswith(("<", _OURS, *_INSTALLED))


def _innermost(frames: Iterable[traceback.FrameSummary]) -> str:
    found = [frame for frame in frames if is_authors(frame.filename)]
    return f" at {found[-1].filename}:{found[-1].lineno}" if found else ""
