"""Source locations of an author's code, for messages with file and line."""

from __future__ import annotations

import asyncio
import inspect
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

_CAUSES = 32
_OURS = f"{Path(__file__).resolve().parents[2]}{os.sep}"
_INSTALLED = tuple({sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")})


def written_at(function: Callable[..., object]) -> str:
    """Return file and line of a function as " (file.py:3)", or an empty text if unknown."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""


def defined_at(kind: type) -> str:
    """Return name, file and line of a class; only the name if its source is unknown."""
    try:
        return f"{kind.__qualname__} ({inspect.getsourcefile(kind)}:{inspect.getsourcelines(kind)[1]})"
    except (OSError, TypeError):
        return kind.__qualname__


def raised_at(error: BaseException) -> str:
    """Return file and line of the author's code that raised or caused an error, as " at file.py:3"; empty if there is none.

    For a group of errors, use the first one. For an error raised by this package, follow its cause.
    """
    location, depth = "", 0
    inner: BaseException | None = error
    while inner is not None and depth < _CAUSES:  # chains of causes may be cyclic
        location = _format_location(authors_frames(traceback.extract_tb(inner.__traceback__))) or location
        inner = inner.exceptions[0] if isinstance(inner, BaseExceptionGroup) else None if location else inner.__cause__
        depth += 1
    return location


def waits_at(task: asyncio.Task[Any]) -> str:
    """Return file and line at which a task is suspended, as " at file.py:3"; empty if not in an author's code."""
    return _format_location(authors_frames(_suspended_frames(task.get_coro())))


def authors_frames(frames: Iterable[traceback.FrameSummary]) -> Sequence[traceback.FrameSummary]:
    """Return the frames of an author's code, outermost first."""
    return [frame for frame in frames if is_authors(frame.filename)]


def is_authors(filename: str) -> bool:
    """Return whether a file belongs neither to this package, nor to Python, nor to an installed package."""
    return not filename.startswith(("<", _OURS, *_INSTALLED))


def _format_location(frames: Sequence[traceback.FrameSummary]) -> str:
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _suspended_frames(awaited: object) -> traceback.StackSummary:
    """Return the frames of a suspended coroutine and of those that it awaits. `Task.get_stack` returns only the first one."""
    frames: list[tuple[FrameType, int]] = []
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is None:
            break
        frames.append((frame, frame.f_lineno))
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return traceback.StackSummary.extract(iter(frames))
