"""Finds code that holds the event loop, and says which: every other rollout waits for it.

The loop beats, and a thread of its own listens. A beat that does not come is somebody who computes, sleeps or reads without
awaiting, and what the loop's thread is doing at that moment is in its stack. A loop that waits for a busy machine beats late
too, but then its thread is found outside of anybody's code, and nothing is said.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate, repeat
from operator import attrgetter
from types import FrameType

from rollout_server.runtime.aio.source_location import authors_frames

_log = logging.getLogger(__name__)
_REMEMBERED = 256
_QUIET_SECONDS = 60.0
"""A function that holds the loop again is told of once in this time."""
_LONG = 10
"""Times as long as is told of at once."""
_WAITING = ("/asyncio/", "/selectors.py", "/uvloop/")
# What runs the loop: none of it, nor what is above it, says anything about who holds it.
_RUNNING = ("/asyncio/events.py", "/asyncio/base_events.py", "/asyncio/runners.py", "/uvloop/")


class LoopWatch:
    """Watches the running loop. Whoever holds it longer than `seconds` is told of once that ends, or at once if it lasts."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._beat = time.monotonic()
        self._thread = threading.Thread(target=self._listen, name="loop watch", daemon=True)
        self._stopped = threading.Event()
        self._watched = 0
        self._timer: asyncio.TimerHandle | None = None
        self._found: tuple[float, traceback.StackSummary] | None = None
        self._reported_beat = 0.0
        self._reported: dict[tuple[str, str], float] = {}

    def start(self) -> None:
        """Begins. Called once, on the loop's thread."""
        self._watched = threading.get_ident()
        self._beat = time.monotonic()
        self._beat_once()
        self._thread.start()

    def stop(self) -> None:
        """Ends, without waiting for the thread, which ends by itself."""
        self._stopped.set()
        if self._timer is not None:
            self._timer.cancel()

    def _beat_once(self) -> None:
        """One beat. If it comes late, what the thread has found meanwhile is who held the loop."""
        now, found, interval = time.monotonic(), self._found, self._seconds / 4
        held = now - self._beat - interval
        if held > self._seconds and found is not None and found[0] == self._beat != self._reported_beat:
            self._report(found[1], f"was held for {1000 * held:.0f} ms")
        self._beat, self._found = now, None
        self._timer = asyncio.get_running_loop().call_later(interval, self._beat_once)

    def _listen(self) -> None:
        while not self._stopped.wait(self._seconds / 4):
            beat = self._beat
            late = time.monotonic() - beat
            if late < self._seconds / 2:
                continue
            frame = sys._current_frames().get(self._watched)
            if frame is None or any(part in frame.f_code.co_filename for part in _WAITING):
                continue
            stack = _stack(frame)
            self._found = (beat, stack)
            if late > _LONG * self._seconds and beat != self._reported_beat:
                self._reported_beat = beat
                self._report(stack, f"is held for {1000 * late:.0f} ms already")

    def _report(self, stack: Sequence[traceback.FrameSummary], what: str) -> None:
        frames = _relevant_frames(stack)
        theirs = authors_frames(frames)
        holder = (theirs or frames)[-1]
        holder_key, now = (holder.filename, holder.name), time.monotonic()
        if now - self._reported.get(holder_key, now - _QUIET_SECONDS) < _QUIET_SECONDS:
            return
        if len(self._reported) >= _REMEMBERED:
            self._reported.clear()
        self._reported[holder_key] = now
        text = "".join(traceback.format_list(list(frames))).rstrip()
        advice = "all rollouts wait for it. Await, or use a thread or a process"
        where = f"{holder.filename}:{holder.lineno} in {holder.name}"
        # On a busy machine any code may be found at it; an author is not warned of what others wrote.
        level = logging.WARNING if theirs else logging.INFO
        _log.log(level, "the event loop %s at %s; %s:\n%s", what, where, advice, text)


def _stack(frame: FrameType) -> traceback.StackSummary:
    """The stack above a frame of a thread that goes on running.

    The frames are read by functions written in C: between their steps no other thread gets the interpreter, so the frames stay
    as they are. `traceback.extract_stack` would read them while the watched thread goes on, calls and returns.
    """
    frames: list[FrameType] = []
    with suppress(AttributeError):  # raised at the end: the outermost frame's `f_back` is None, which has none
        frames.extend(accumulate(repeat("f_back"), getattr, initial=frame))
    lines = list(map(attrgetter("f_code.co_filename", "f_lineno", "f_code.co_name"), frames[:-1]))
    return traceback.StackSummary.from_list(
        [(name, line or 0, function, None) for name, line, function in reversed(lines)]
    )


def _relevant_frames(stack: Sequence[traceback.FrameSummary]) -> Sequence[traceback.FrameSummary]:
    """The frames from the author's first one on; where there is none, from the coroutine or callback that the loop runs."""
    running = [index for index, frame in enumerate(stack) if any(part in frame.filename for part in _RUNNING)]
    ran = stack[running[-1] + 1 :] if running else stack
    theirs = authors_frames(ran)
    return ran[ran.index(theirs[0]) :] if theirs else ran or stack


class LoopLag:
    """Sleeps again and again and tells `observe` how many seconds late it woke, never less than 0."""

    def __init__(self, observe: Callable[[float], None], interval: float = 0.1) -> None:
        self._observe = observe
        self._interval = interval
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins, on the running loop. Once begun it goes on until `stop`."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="loop lag")

    async def stop(self) -> None:
        """Ends."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        now = asyncio.get_running_loop().time
        while True:
            due = now() + self._interval
            await asyncio.sleep(self._interval)
            self._observe(max(0.0, now() - due))
