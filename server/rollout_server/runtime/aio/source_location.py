"""Where an author's code is, for messages that name file and line."""

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
    """File and line of a function, as " (file.py:3)"; empty where nobody knows."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""


def defined_at(kind: type) -> str:
    """Class, file and line; without these two where nobody knows."""
    try:
        return f"{kind.__qualname__} ({inspect.getsourcefile(kind)}:{inspect.getsourcelines(kind)[1]})"
    except (OSError, TypeError):
        return kind.__qualname__


def raised_at(error: BaseException) -> str:
    """File and line of the author's code that raised an error or led to it, as " at file.py:3"; empty where none did.

    Of a group of errors it is that of the first one, and of an error of ours that of its cause.
    """
    location, depth = "", 0
    inner: BaseException | None = error
    while inner is not None and depth < _CAUSES:  # causes may go round in circles
        location = _format_location(authors_frames(traceback.extract_tb(inner.__traceback__))) or location
        inner = inner.exceptions[0] if isinstance(inner, BaseExceptionGroup) else None if location else inner.__cause__
        depth += 1
    return location


def waits_at(task: asyncio.Task[Any]) -> str:
    """The same for what a task waits for."""
    return _format_location(authors_frames(_suspended_frames(task.get_coro())))


def authors_frames(frames: Iterable[traceback.FrameSummary]) -> Sequence[traceback.FrameSummary]:
    """Those that are an author's, outermost first."""
    return [frame for frame in frames if is_authors(frame.filename)]


def is_authors(filename: str) -> bool:
    """Whether a file is neither ours, nor Python's, nor an installed package's."""
    return not filename.startswith(("<", _OURS, *_INSTALLED))


def _format_location(frames: Sequence[traceback.FrameSummary]) -> str:
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _suspended_frames(awaited: object) -> traceback.StackSummary:
    """The frames of a coroutine that waits, and of those that it waits for. `Task.get_stack` tells only of the first."""
    frames: list[tuple[FrameType, int]] = []
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is None:
            break
        frames.append((frame, frame.f_lineno))
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return traceback.StackSummary.extract(iter(frames))
